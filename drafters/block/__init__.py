"""DSpark and DFlash: drafters that propose a whole block from the target's hidden states."""
