"""The whole runtime in one thread, with virtual time and seeded entropy, amid crashes: invariants must hold.

A seed draws its sizes and its faults (`options`), then clients make operations through simulated processes, which run
the product's own loops over one SQLite file and die before statements, at failpoints, around sends, and at COMMIT. An
operation is one publish, send or timer that a client asks for and is answered for; several of them may be one
transaction. Beside the clients there are consumers that acknowledge what they get, programs that withdraw, and an
operator (`people`). Groups of transactions form as they do in threads: a writer that is busy lets others join. After
each crash and at the end every invariant is checked.

`python -m postroad.testing.simulation --seeds 100` plays seeds 0 to 99; `--seed 17` plays one and tells it, `--shrink`
makes a failure smaller, `--mutants` plants bugs and says how soon each is found. Crashes are those of processes: the
files are written with `synchronous=OFF`, so that nothing here says what a power cut does.
"""
