"""What others do in the same role, each driven as its users drive it; not in the package."""
