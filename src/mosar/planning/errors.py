"""What goes wrong when a plan is made."""


class PlanError(Exception):
    """A request that no plan fits; its text is the one line the user sees."""
