// Package replica knows the engines behind the gateway: which there are, whether they can serve, and how loaded they are.
//
// In go a list of addresses, the outcome of every request, and what the engines tell about themselves (/health, /metrics
// and /v1/models, polled by goroutines that belong to Fleet.Run). Out come Snapshots, one per replica, cheap enough to be
// taken for each request, and Leases, by which the gateway counts what it has sent and not yet seen the end of. Nothing
// here chooses a replica, and nothing on the way of a request waits for I/O.
//
// # Health
//
// A replica is healthy while its /health answers 2xx and nothing speaks against it. Any other answer, or a refused
// connection, takes it out at once; silence only after a few polls, and not while it serves requests: an engine that is
// busy with large prompts answers its health path late, and taking it out would hurt all the others. For requests, a
// connection that fails ejects it at once, until /health has answered again after a pause that doubles with each ejection; first bytes that do not come, or
// counters that stand still while requests run, eject it for a while and let it back with one request at a time until one
// succeeds. A replica that has never answered /health is not healthy.
//
// # Load
//
// In-flight requests and their prefill tokens are counted at dispatch, so that a burst spreads although the engines' own
// counts are a second old. Scraped numbers that are older than a few intervals are reported as not fresh and never make a
// replica unusable. A Lease keeps hold of the very instance it was taken of: the end of a request never touches a later
// instance at the same address.
package replica
