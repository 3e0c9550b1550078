"""What the embedded runtime costs, beside the raw limit of the machine. See `benchmarks.__main__`."""
