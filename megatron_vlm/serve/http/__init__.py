"""What clients of a service meet: HTTP in front of its journal. Knows no model and no torch."""
