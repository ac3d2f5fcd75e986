"""Who we are to a store. Each module serves one vendor, finds credentials by that vendor's usual chain, hands
the same ones to the library that lists and the one that reads, and can look again when the store no longer
accepts them."""
