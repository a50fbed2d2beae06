"""Media of prompts: from files to what an engine and a trainer take, the same bytes for both."""
