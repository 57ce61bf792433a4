"""What each engine's start-up log states: one reader per engine. ``startlog.facts`` puts them to work."""
