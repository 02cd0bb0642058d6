"""Programs made of modules that are written twice; ``python tests/support/module_pairs --count 10000`` runs many."""
