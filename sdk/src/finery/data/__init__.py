"""Checking data files: the same code that the service runs on an upload. Loads no HTTP client."""
