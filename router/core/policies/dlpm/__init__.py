"""DLPM and D²LPM ("Locality-aware Fair Scheduling in LLM Serving"), and the default policy built on them."""
