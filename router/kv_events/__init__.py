"""The workers' KV events, and the tokens by which calls are matched to them."""
