"""How results are shown: tables for the terminal, figures, and one self-contained page."""
