"""The loop that tunes itself: from windows that are over to moves that pay, with one number to give."""
