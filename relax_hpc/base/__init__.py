"""What all other packages use: errors, fields, run directories, metrics, small helpers."""
