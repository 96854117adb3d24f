"""Pictures and pages that show plans, measurements and simulations."""
