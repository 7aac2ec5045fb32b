"""A decoder block around attention: experts, their router, MLPs, sums over ranks and norms."""
