"""The live page in Debian's Chromium, and what its readers cost the router (make test-page)."""
