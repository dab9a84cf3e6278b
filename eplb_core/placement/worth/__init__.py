"""What a layout is worth: times, costs, verdicts and reports."""
