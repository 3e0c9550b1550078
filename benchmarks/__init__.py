"""What the embedded runtime costs, beside the raw limit of the machine it runs on. See `benchmarks.__main__`."""
