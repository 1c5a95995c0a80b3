"""Environments: where prompts come from, and what rewards an answer."""
