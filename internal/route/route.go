// Package route chooses the replica that shall serve a request.
//
// In go what the request is (token counts and a few keys, never its text) and one Candidate for each replica that may
// serve it: how much of the prompt it holds and how loaded it is. Out comes a Decision: which candidate, why, and what it
// is expected to cost. Policies are pure: no I/O, no clock, no logging, no allocation on the way of a request; what they
// remember between requests (a round robin's position) is their own and safe for concurrent use.
package route

import (
	"time"

	"prefixgate/internal/replica"
)

// Request is what a policy may know of a request.
type Request struct {
	// PromptTokens is the exact number of prompt tokens; 0 if the prompt could not be tokenized.
	PromptTokens int
	// Prefix is a hash of the prompt's first blocks, the same on every gateway; 0 if there is none. Cold ties are broken
	// by rendezvous hashing over it.
	Prefix uint64
	// TextPrefix is a hash of the prompt's first tokens or characters, as many as the prefix-hash policy was configured
	// for; 0 if there is none.
	TextPrefix uint64
	// SimHash is a 64-bit locality-sensitive hash of the prompt; only set for the simhash policy.
	SimHash uint64
	// Session is a hash of the client's session key; 0 if the request names none.
	Session uint64
	// Adapter says that the request is for a LoRA adapter, so that Candidate.Adapter counts.
	Adapter bool
}

// AdapterState says what a replica would have to do to serve the request's adapter.
type AdapterState uint8

// The states of an adapter on a replica.
const (
	// AdapterUnknown is a replica that does not tell.
	AdapterUnknown AdapterState = iota
	// AdapterLoaded is ready on the replica.
	AdapterLoaded
	// AdapterLoadable is not loaded, but a slot is free.
	AdapterLoadable
	// AdapterFull is not loaded and all slots are taken: another one would have to go.
	AdapterFull
)

// Candidate is one replica as seen at one instant. The gateway fills one per replica of the model; none is retained.
type Candidate struct {
	// ID is the replica's identity; it decides rendezvous hashing and nothing else.
	ID replica.ID
	// MatchedTokens is how many of the prompt's tokens the replica's KV cache is expected to hold.
	MatchedTokens int
	// QueuedTokens is the number of prefill tokens ahead of this request: of all gateways' requests that were sent to the
	// replica and have not answered their first token.
	QueuedTokens int64
	// QueuedPrompts is how many prompts QueuedTokens adds up, and QueueAge for how long the replica has been computing the
	// first of them: since its last first token, or since it got work. Together they tell how much of it is already done. 0 if
	// unknown: then nothing is taken to be done.
	QueuedPrompts int
	QueueAge      time.Duration
	// InFlight is the number of requests of all gateways on the replica, whatever their phase.
	InFlight int
	// Running and Waiting are the engine's own counts at the last scrape, summed over its engines.
	Running, Waiting int
	// KVUsage is the part of the KV cache in use by running requests, 0 to 1; NaN if unknown.
	KVUsage float64
	// PrefillRate is the learned prefill speed in tokens per second; 0 if not yet known.
	PrefillRate float64
	// MetricsFresh says that Running, Waiting and KVUsage are recent enough to be used.
	MetricsFresh bool
	// Healthy is false for a replica that failed its checks or is ejected.
	Healthy bool
	// Draining replicas finish what they have and get nothing new.
	Draining bool
	// Adapter is the state of the request's adapter on this replica.
	Adapter AdapterState
	// Weight is the configured relative capacity; 0 means 1.
	Weight float64
}

// Reason says why a candidate was picked. The set is closed: it is a metric's label.
type Reason string

// The reasons of a Decision.
const (
	// ReasonPrefix: the pick holds part of the prompt and that decided it.
	ReasonPrefix Reason = "prefix"
	// ReasonLoad: the pick was the least loaded, whatever it holds.
	ReasonLoad Reason = "load"
	// ReasonSpread: another replica holds more of the prompt, but its queue costs more than that saves.
	ReasonSpread Reason = "spread"
	// ReasonCold: no replica holds anything; equal costs, broken by rendezvous hash.
	ReasonCold Reason = "cold"
	// ReasonSession: the client's session key decided.
	ReasonSession Reason = "session"
	// ReasonHash: a consistent hash of the prompt decided.
	ReasonHash Reason = "hash"
	// ReasonAdapter: the adapter's being loaded decided.
	ReasonAdapter Reason = "adapter"
	// ReasonRotation: round robin or random.
	ReasonRotation Reason = "rotation"
	// ReasonProbe: an idle replica was tried so that what is believed of it is tested again.
	ReasonProbe Reason = "probe"
	// ReasonOnly: there was one candidate.
	ReasonOnly Reason = "only"
	// ReasonSaturated: all candidates are over their thresholds; the least bad was taken.
	ReasonSaturated Reason = "saturated"
)

// Decision is a policy's answer.
type Decision struct {
	// Index is the position of the pick in the candidates.
	Index int
	// Reason is why.
	Reason Reason
	// ExpectedTTFT is the expected time to first token on the pick, whatever the policy: queued and uncached tokens at the
	// replica's prefill rate.
	ExpectedTTFT time.Duration
}

// Policy picks a candidate. Pick must not block, allocate or retain its arguments, and must be safe for concurrent use.
// It returns ok == false only if no candidate may be used at all (none given, or all unhealthy or draining).
type Policy interface {
	// Name is the policy's name in the configuration.
	Name() string
	// Pick chooses among candidates.
	Pick(req *Request, candidates []Candidate) (d Decision, ok bool)
}
