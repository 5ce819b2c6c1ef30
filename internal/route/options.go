package route

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// The names of the policies, as in Options.Policy.
const (
	LeastTTFT     = "least-ttft"
	Session       = "session"
	PrefixHash    = "prefix-hash"
	SimHash       = "simhash"
	Weighted      = "weighted"
	LongestPrefix = "longest-prefix"
	LeastLoad     = "least-load"
	PowerOfTwo    = "power-of-two"
	RoundRobin    = "round-robin"
	Random        = "random"
)

// Names returns the names of all policies, the default first.
func Names() []string {
	return []string{
		LeastTTFT, Session, PrefixHash, SimHash, Weighted, LongestPrefix, LeastLoad, PowerOfTwo, RoundRobin, Random,
	}
}

// Options choose a policy and tune it. The zero value is least-ttft with the defaults named below; docs/policies.md explains
// each formula.
type Options struct {
	// Policy is one of Names; empty means least-ttft.
	Policy string `yaml:"policy"`
	// ProbeEvery makes about one decision in so many a probe: an idle candidate, chosen by turns, gets the request, so that
	// what is believed of it (a prefill rate learned on a bad day) is tested again. 0 means 1024; below 0 turns it off.
	// Requests that a session key binds are never probes, and the policies that visit all replicas anyway (round-robin, random,
	// power-of-two) make none.
	ProbeEvery int `yaml:"probe_every"`
	// Seed makes gateways differ where they should: each starts its round robin at another replica and draws other random
	// numbers. What gateways must agree on does not depend on it. The gateway sets it; it is not part of the configuration.
	Seed uint64 `yaml:"-"`
	// Saturation says which replicas are kept out of any policy's choice while others are not saturated.
	Saturation SaturationOptions `yaml:"saturation"`

	LeastTTFT     LeastTTFTOptions     `yaml:"least_ttft"`
	Session       SessionOptions       `yaml:"session"`
	PrefixHash    PrefixHashOptions    `yaml:"prefix_hash"`
	SimHash       SimHashOptions       `yaml:"simhash"`
	Weighted      WeightedOptions      `yaml:"weighted"`
	LongestPrefix LongestPrefixOptions `yaml:"longest_prefix"`
}

// SaturationOptions bound what a replica may carry before it is kept out of the choice. When every usable replica is over a
// bound, none is kept out. Bounds on the engine's own figures count only while these are fresh.
type SaturationOptions struct {
	// MaxWaiting is the number of requests in the engine's own queue above which it is saturated. 0 means 256; below 0
	// turns the bound off.
	MaxWaiting int `yaml:"max_waiting"`
	// MaxKVUsage is the part of the KV cache in use by running requests, 0 to 1, above which the replica is saturated if it
	// also has requests waiting. 0 means 0.98; below 0 turns the bound off.
	MaxKVUsage float64 `yaml:"max_kv_usage"`
	// MaxInFlight is the number of requests of all gateways at which the replica is saturated. 0 means no bound.
	MaxInFlight int `yaml:"max_in_flight"`
}

// LeastTTFTOptions tune the policy least-ttft.
type LeastTTFTOptions struct {
	// UncachedWeight is the weight w of the tokens that this request would have computed, against 1 for those queued before
	// it: they also delay whoever comes next. 0 means 1.5.
	UncachedWeight float64 `yaml:"uncached_weight"`
	// PrefillRate is the prefill speed in tokens per second of a replica of weight 1 while no replica's is known. 0 means
	// 8000.
	PrefillRate float64 `yaml:"prefill_rate"`
	// DecodeCost is what each request in flight on a replica is taken to cost a new one. 0 means 5ms; below 0 nothing.
	DecodeCost time.Duration `yaml:"decode_cost"`
	// ImbalanceCost times the square of the requests in flight beyond ImbalanceSlack over the candidates' mean comes on top. It
	// makes a hot prefix spread to more replicas. 0 means 100ms; below 0 nothing.
	ImbalanceCost time.Duration `yaml:"imbalance_cost"`
	// ImbalanceSlack is the number of requests that a replica may have in flight over the mean before ImbalanceCost counts.
	// 0 means 3; below 0 none.
	ImbalanceSlack float64 `yaml:"imbalance_slack"`
	// Sample is how many of the replicas that hold exactly as much of the prompt are compared, at most 64. 0 means 8; below 0
	// all are. In a fleet of more replicas it keeps gateways that hear of each other late from all sending to the cheapest one.
	Sample int `yaml:"sample"`
	// KVCost is what a completely used KV cache costs. It counts from 80 % of use on and grows with the square of what is
	// above. 0 means 2s; below 0 nothing.
	KVCost time.Duration `yaml:"kv_cost"`
	// AdapterCost is what loading the request's adapter costs where it is not loaded. 0 means 500ms; below 0 nothing.
	AdapterCost time.Duration `yaml:"adapter_cost"`
}

// SessionOptions say where the session key stands and when it no longer binds.
type SessionOptions struct {
	// Header, Cookie and Field name the request header, the cookie and the top-level member of the JSON body that hold the
	// session key; they are tried in this order. If all are empty, Header is x-session-id.
	Header string `yaml:"header"`
	Cookie string `yaml:"cookie"`
	Field  string `yaml:"field"`
	// MaxLoadFactor is the load in parts of the mean from which a replica is overloaded for a session, which then goes to
	// its next choice. 0 means 2; below 0 a session never leaves a usable replica.
	MaxLoadFactor float64 `yaml:"max_load_factor"`
	// MinLoad is the number of requests in flight up to which a replica is never overloaded for a session. 0 means 16; below
	// 0 none.
	MinLoad int `yaml:"min_load"`
}

// PrefixHashOptions tune the policy prefix-hash.
type PrefixHashOptions struct {
	// Tokens is how many tokens of the prompt's beginning are hashed. 0 means 1024.
	Tokens int `yaml:"tokens"`
	// Characters, if set, hashes so many characters of the first user message or of the prompt's text instead of tokens.
	// KubeAI's default is 100.
	Characters int `yaml:"characters"`
	// LoadFactor bounds a replica's requests in flight, in parts of the mean. 0 means 1.25, which is KubeAI's 125 percent.
	LoadFactor float64 `yaml:"load_factor"`
}

// SimHashOptions tune the policy simhash.
type SimHashOptions struct {
	// Tokens is how many tokens of the prompt are hashed. 0 means 4096.
	Tokens int `yaml:"tokens"`
	// LoadFactor bounds a replica's requests in flight, in parts of the mean. 0 means 1.25; below 0 turns the bound off.
	LoadFactor float64 `yaml:"load_factor"`
}

// WeightedOptions tune the policy weighted, which scores as the endpoint picker of the Gateway API inference extension does.
type WeightedOptions struct {
	// PrefixWeight is the weight of the part of the prompt that is cached. 0 means 3; below 0 none.
	PrefixWeight float64 `yaml:"prefix_weight"`
	// QueueWeight is the weight of a short queue. 0 means 2; below 0 none.
	QueueWeight float64 `yaml:"queue_weight"`
	// KVWeight is the weight of free KV cache. 0 means 2; below 0 none.
	KVWeight float64 `yaml:"kv_weight"`
	// QueueThreshold is the queue in requests above which a replica is used only if all are. 0 means 5; below 0 no threshold.
	QueueThreshold int `yaml:"queue_threshold"`
	// KVThreshold is the use of the KV cache, 0 to 1, above which a replica is used only if all are. 0 means 0.8; below 0 no
	// threshold.
	KVThreshold float64 `yaml:"kv_threshold"`
	// AdapterQueueThreshold is the queue in requests up to which replicas that have the adapter loaded are preferred. 0
	// means 128; below 0 turns the preference off.
	AdapterQueueThreshold int `yaml:"adapter_queue_threshold"`
}

// LongestPrefixOptions tune the policy longest-prefix.
type LongestPrefixOptions struct {
	// MinMatch is the part of the prompt, 0 to 1, that must match for the match to decide. 0 means 0.5; below 0 any match
	// decides.
	MinMatch float64 `yaml:"min_match"`
	// BalanceAbs and BalanceRel are the imbalance gate: the least loaded replica is taken, whatever matches, when the highest
	// load is more than BalanceAbs requests and more than BalanceRel times over the lowest. 0 means 32 and 1.1; BalanceAbs
	// below 0 turns the gate off.
	BalanceAbs int     `yaml:"balance_abs"`
	BalanceRel float64 `yaml:"balance_rel"`
}

// Validate returns all that is wrong, each with the key's path relative to Options, joined.
func (o Options) Validate() error {
	var errs []error
	if o.Policy != "" && !slices.Contains(Names(), o.Policy) {
		errs = append(errs, fmt.Errorf("policy: got %q, want one of %s", o.Policy, strings.Join(Names(), ", ")))
	}
	finite := func(key string, v, least, most float64) {
		if !(v >= least && v <= most) {
			errs = append(errs, fmt.Errorf("%s: got %v, want a number from %v to %v", key, v, least, most))
		}
	}
	finite("saturation.max_kv_usage", o.Saturation.MaxKVUsage, -1, 1)
	finite("least_ttft.uncached_weight", o.LeastTTFT.UncachedWeight, 0, 1000)
	finite("least_ttft.sample", float64(o.LeastTTFT.Sample), math.Inf(-1), maxSample)
	finite("least_ttft.prefill_rate", o.LeastTTFT.PrefillRate, 0, 1e9)
	finite("least_ttft.imbalance_slack", o.LeastTTFT.ImbalanceSlack, -1, 1e6)
	if f := o.Session.MaxLoadFactor; f >= 0 && f != 0 {
		finite("session.max_load_factor", f, 1, 1e6)
	} else {
		finite("session.max_load_factor", f, -1, 1e6)
	}
	finite("prefix_hash.tokens", float64(o.PrefixHash.Tokens), 0, 1<<20)
	finite("prefix_hash.characters", float64(o.PrefixHash.Characters), 0, 1<<20)
	if f := o.PrefixHash.LoadFactor; f != 0 {
		finite("prefix_hash.load_factor", f, 1, 1e6)
	}
	finite("simhash.tokens", float64(o.SimHash.Tokens), 0, 1<<20)
	if f := o.SimHash.LoadFactor; f > 0 {
		finite("simhash.load_factor", f, 1, 1e6)
	} else {
		finite("simhash.load_factor", f, -1, 0)
	}
	finite("weighted.prefix_weight", o.Weighted.PrefixWeight, -1, 1e6)
	finite("weighted.queue_weight", o.Weighted.QueueWeight, -1, 1e6)
	finite("weighted.kv_weight", o.Weighted.KVWeight, -1, 1e6)
	finite("weighted.kv_threshold", o.Weighted.KVThreshold, -1, 1)
	finite("longest_prefix.min_match", o.LongestPrefix.MinMatch, -1, 1)
	if f := o.LongestPrefix.BalanceRel; f != 0 {
		finite("longest_prefix.balance_rel", f, 1, 1e6)
	}
	return errors.Join(errs...)
}

// or returns v, or def if v is zero, or zero if v is below zero: how most options read.
func or[T int | float64 | time.Duration](v, def T) T {
	switch {
	case v == 0:
		return def
	case v < 0:
		return 0
	}
	return v
}
