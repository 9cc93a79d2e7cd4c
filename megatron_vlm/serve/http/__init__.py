"""HTTP interface of a service in front of its journal. It knows no model and does not import
torch."""
