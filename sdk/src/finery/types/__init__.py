"""The public vocabulary, its one home. Importing it loads no HTTP client."""
