"""The virtual token counter ("Fairness in Serving Large Language Models")."""
