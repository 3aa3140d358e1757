"""What single architectures need beyond ordinary attention: a file for each family."""
