"""The supervisor: it starts groups, judges failures and brings groups back."""
