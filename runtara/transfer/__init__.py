"""A whole store to a file of lines, and back: `export_store` and `import_store`."""
