package index

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// Options configures an index. The zero value works. Durations of 0 mean the default.
type Options struct {
	// TTL is how long an entry that nobody touches counts and lives. Default 1h. Longer than the replicas keep a block is
	// harmless where their metrics tell how long that is; shorter loses hits.
	TTL time.Duration `yaml:"ttl"`
	// MaxMemoryBytes bounds the embedded index. Default 256 MiB. With Redis it holds what this gateway recorded itself,
	// the answer while Redis is away.
	MaxMemoryBytes int64 `yaml:"max_memory_bytes"`
	// NearCacheBytes bounds the near cache in front of Redis. Default 64 MiB.
	NearCacheBytes int64 `yaml:"near_cache_bytes"`
	// NearCacheStaleness is how old an entry of the near cache may be to answer without asking Redis; what other gateways
	// recorded since is not seen. Default 1s; negative always asks.
	NearCacheStaleness time.Duration `yaml:"near_cache_staleness"`
	// LookupTimeout is the longest a lookup waits for Redis. Default 5ms.
	LookupTimeout time.Duration `yaml:"lookup_timeout"`
	// WriteTimeout is the longest one batch of records, which no request waits for, may take. Default 500ms.
	WriteTimeout time.Duration `yaml:"write_timeout"`
	// RefreshInterval is how old a record in Redis must be to be written again when it is touched. Default: an eighth of
	// the TTL, but at most 30s. It is also by how much the age of an entry may be overestimated, so it is shortened by itself
	// to an eighth of the smallest Holder.MaxAge, but no less than a second.
	RefreshInterval time.Duration `yaml:"refresh_interval"`
	// QueueLength bounds the records waiting to be written to Redis; beyond it they are dropped and counted. Default 4096.
	QueueLength int `yaml:"queue_length"`
	// BatchSize is how many records at most go to Redis in one pipeline. Default 64.
	BatchSize int `yaml:"batch_size"`
	// FailureThreshold is how many lookups or writes in a row must fail for Redis to be left alone. Default 5.
	FailureThreshold int `yaml:"failure_threshold"`
	// ProbeInterval is how often Redis is tried while it is left alone. Default 250ms.
	ProbeInterval time.Duration `yaml:"probe_interval"`
	// PollInterval is how often what other gateways forgot is read, and Redis is tried while all is well. Default 1s.
	PollInterval time.Duration `yaml:"poll_interval"`
	// KeyPrefix begins every key; the schema version and a colon follow. Default "pg". Gateways with different prefixes
	// on one Redis know nothing of each other.
	KeyPrefix string `yaml:"key_prefix"`
	// Clock tells the time, for tests. Default time.Now. Gateways that share a Redis compare each other's times: clocks
	// that differ by a second make ages wrong by a second.
	Clock func() time.Time `yaml:"-"`
}

// Validate returns all that is wrong with the options, joined.
func (o Options) Validate() error {
	var errs []error
	for _, d := range []struct {
		key string
		v   time.Duration
	}{
		{"ttl", o.TTL},
		{"lookup_timeout", o.LookupTimeout},
		{"write_timeout", o.WriteTimeout},
		{"refresh_interval", o.RefreshInterval},
		{"probe_interval", o.ProbeInterval},
		{"poll_interval", o.PollInterval},
	} {
		if d.v < 0 {
			errs = append(errs, fmt.Errorf("%s: %v is negative; leave it out for the default", d.key, d.v))
		}
	}
	for _, n := range []struct {
		key string
		v   int64
	}{
		{"max_memory_bytes", o.MaxMemoryBytes},
		{"near_cache_bytes", o.NearCacheBytes},
		{"queue_length", int64(o.QueueLength)},
		{"batch_size", int64(o.BatchSize)},
		{"failure_threshold", int64(o.FailureThreshold)},
	} {
		if n.v < 0 {
			errs = append(errs, fmt.Errorf("%s: %d is negative; leave it out for the default", n.key, n.v))
		}
	}
	if o.TTL > 0 && o.TTL < time.Second {
		errs = append(errs, fmt.Errorf("ttl: %v is too short, want at least 1s", o.TTL))
	}
	if w := o.withDefaults(); o.RefreshInterval > 0 && w.RefreshInterval > w.TTL/2 {
		errs = append(errs, fmt.Errorf("refresh_interval: %v is more than half of ttl (%v): entries in use would expire", o.RefreshInterval, w.TTL))
	}
	if strings.ContainsAny(o.KeyPrefix, "{}*?[]\\ \r\n") {
		errs = append(errs, fmt.Errorf("key_prefix: %q holds a character that Redis gives a meaning to (braces, brackets, *, ?, backslash, space)", o.KeyPrefix))
	}
	return errors.Join(errs...)
}

func (o Options) withDefaults() Options {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&o.TTL, time.Hour)
	def(&o.NearCacheStaleness, time.Second)
	def(&o.LookupTimeout, 5*time.Millisecond)
	def(&o.WriteTimeout, 500*time.Millisecond)
	def(&o.RefreshInterval, min(o.TTL/8, 30*time.Second))
	def(&o.ProbeInterval, 250*time.Millisecond)
	def(&o.PollInterval, time.Second)
	if o.MaxMemoryBytes == 0 {
		o.MaxMemoryBytes = 256 << 20
	}
	if o.NearCacheBytes == 0 {
		o.NearCacheBytes = 64 << 20
	}
	if o.QueueLength == 0 {
		o.QueueLength = 4096
	}
	if o.BatchSize == 0 {
		o.BatchSize = 64
	}
	if o.FailureThreshold == 0 {
		o.FailureThreshold = 5
	}
	if o.KeyPrefix == "" {
		o.KeyPrefix = "pg"
	}
	if o.Clock == nil {
		o.Clock = time.Now
	}
	return o
}
