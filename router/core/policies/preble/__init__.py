"""Preble ("Efficient Distributed Prompt Scheduling for LLM Serving")."""
