"""An OpenAI-compatible router that is fair to clients and keeps the prefix cache warm."""
