"""What the sentence of a failed start means, in numbers, and what to change: one module for each engine, and one for the machine below it."""
