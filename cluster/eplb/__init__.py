"""Live rebalancing of experts: the plan, the decision whether it pays, and the actor that publishes it."""
