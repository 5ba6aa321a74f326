"""How the demo's policy is made (`make checkpoint`), and the control that must not learn."""
