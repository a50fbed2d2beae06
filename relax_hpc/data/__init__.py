"""Prompts, their tokenizer, and makers of a small task and a small model that need no network."""
