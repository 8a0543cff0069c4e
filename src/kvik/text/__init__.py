"""From text to token ids and back: tokenizer, streams, stop strings, chat templates."""
