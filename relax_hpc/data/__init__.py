"""Prompts, their tokenizer, and makers of a small task and a small model that need no network.

A prompt passes these modules: rows (read from files) -> prompts (chat template, tokens, media) ->
prompt_file (index). visits assigns a prompt to each ticket.
"""
