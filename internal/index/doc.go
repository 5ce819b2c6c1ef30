// Package index remembers which replica probably holds which prefixes in its KV cache.
//
// In go the chain of a prompt's block hashes and the replicas that may serve it; out comes, for each of them, how many
// leading blocks it is believed to hold. Behind the request the replica that computed the prompt is recorded. The package
// never sees a token or a text, never fails a request, and holds nothing that cannot be learned again.
//
// # Runs
//
// A hash per block would cost a key per block: a prompt of 100,000 tokens has 6,250 of them, and asking for each is what
// makes a shared index slow. Holdings are prefix-closed for almost all replicas, since engines evict a request's last block
// first, so the index keeps runs instead: a run is named by the hash of its first block and lists 32-bit fingerprints of
// the blocks that follow on one path, with one small claim for each holder: "the first n blocks of this, last touched at t".
//
// Every chain is cut at the same positions, the heads: each 32 blocks at first, later each half of a power of two
// (segmentEnd). A head's hash names everything before it, so any two chains that share a head share all runs before, and
// a chain of n blocks has at most 2 log2 n heads. Within a segment, the first chain recorded gives the head's run its path;
// a chain that leaves it after d blocks continues in another run, named by its own first differing block. Runs that leave
// such a run in turn are found through offsets kept at the head (nested).
//
// A lookup therefore asks for the heads, which tells where each holder's knowledge ends to within a segment, how far the
// prompt follows the recorded path in it and under which hash it would continue elsewhere; and, only if some holder reaches
// exactly that point, for these continuations. That is at most two round trips however long the prompt. The result is exact
// for prefix-closed holdings unless more than 15 paths fork from forks within one segment, beyond where the prompt left the
// first; then it may be an underestimate, by less than that segment.
//
// A claim counts if it is young enough: touched within the TTL, within the holder's MaxAge, and not before the
// holder was forgotten. Whoever touches block i touches all before it, so the deepest claim that counts decides. A hole
// before it (a replica that lost a block in the middle) is not seen: the replica computes from the hole on, once,
// and the request costs what it would have cost without the index.
//
// # Backends
//
// [Memory] keeps the runs in the process, bounded in bytes. [Redis] shares them between gateways: one hash key for each
// run, a field for the path and one for each holder, a TTL on all; behind a near cache of runs with bounded staleness, a
// deadline, and a circuit breaker; and with a Memory of what this gateway recorded itself, which answers when Redis does not.
// Writes to a run replace single fields, so gateways do not overwrite each other's claims and need no scripts.
package index
