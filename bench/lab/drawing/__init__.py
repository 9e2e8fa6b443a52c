"""How the pictures of the lab look: colours, marks, axes, legends and the page they stand on."""
