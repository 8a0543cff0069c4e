"""The production server: OpenAI- and Anthropic-compatible, over one engine."""
