"""OpenAI responses that engines store or compute in the background."""
