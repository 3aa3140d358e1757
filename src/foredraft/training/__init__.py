"""Training of MTP modules over a frozen target: synthesis of text, fitting, evaluation, export."""
