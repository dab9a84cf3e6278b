"""A layer improved from the live layout: exchanges, gifts, lost experts restored, slots relabelled."""
