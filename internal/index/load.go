package index

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"prefixgate/internal/replica"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/redis/go-redis/v9"
)

// Load is what gateways have in flight on a replica.
type Load struct {
	// PrefillTokens are the uncached prompt tokens of requests without a first token yet, and Prefills is their number.
	PrefillTokens int64
	Prefills      int
	// Requests are all requests without an end yet.
	Requests int
	// Began is when the replica began with the first of those prefills, as far as the gateways saw; zero if they don't know.
	Began time.Time
}

// add returns the sum of two gateways' loads: what either saw begin last is what the replica is working on.
func (l Load) add(m Load) Load {
	l.PrefillTokens += m.PrefillTokens
	l.Prefills += m.Prefills
	l.Requests += m.Requests
	if m.Began.After(l.Began) {
		l.Began = m.Began
	}
	return l
}

// LoadOptions configures a LoadShare. The zero value works. Durations of 0 mean the default.
type LoadOptions struct {
	// Interval is how often the own load is published and the others' read. Default 100ms.
	Interval time.Duration `yaml:"interval"`
	// TTL is how long the share of a gateway that publishes no more is counted. Default 1s.
	TTL time.Duration `yaml:"ttl"`
	// Timeout is the longest one exchange with Redis, which no request waits for, may take. Default 100ms.
	Timeout time.Duration `yaml:"timeout"`
	// KeyPrefix is as in Options. Default "pg".
	KeyPrefix string `yaml:"key_prefix"`
}

// Validate returns all that is wrong with the options, joined.
func (o LoadOptions) Validate() error {
	var errs []error
	for _, d := range []struct {
		key string
		v   time.Duration
	}{{"interval", o.Interval}, {"ttl", o.TTL}, {"timeout", o.Timeout}} {
		if d.v < 0 {
			errs = append(errs, fmt.Errorf("%s: %v is negative; leave it out for the default", d.key, d.v))
		}
	}
	if w := o.withDefaults(); len(errs) == 0 && w.TTL < 2*w.Interval {
		errs = append(errs, fmt.Errorf("ttl: %v is less than two intervals (%v): shares would flicker", w.TTL, w.Interval))
	}
	return errors.Join(errs...)
}

func (o LoadOptions) withDefaults() LoadOptions {
	if o.Interval == 0 {
		o.Interval = 100 * time.Millisecond
	}
	if o.TTL == 0 {
		o.TTL = time.Second
	}
	if o.Timeout == 0 {
		o.Timeout = 100 * time.Millisecond
	}
	if o.KeyPrefix == "" {
		o.KeyPrefix = "pg"
	}
	return o
}

const (
	// deadAfter is how long a gateway must have been silent for its field to be removed, by whoever sees it.
	deadAfter = time.Minute
	// slowestExchange bounds the pause between attempts while Redis is away.
	slowestExchange = time.Second
)

// LoadShare tells the other gateways what this one has in flight on each replica, and knows what they have. All publish into
// one small hash, a field each, and read it whole: three commands each interval, whatever the number of requests.
type LoadShare struct {
	client  redis.UniversalClient
	opts    LoadOptions
	key     string
	field   string
	log     *slog.Logger
	metrics *loadMetrics
	others  atomic.Pointer[map[uint64]Load] // by holder key; never changed once stored

	// The rest belongs to Run.
	seen map[string]*peer
	seq  uint64
}

// peer is another gateway. Its age is told by when its sequence number last changed here, so that clocks need not agree.
type peer struct {
	seq     uint64
	changed time.Time
	load    map[uint64]Load
}

type loadMetrics struct {
	errs     [failures]prometheus.Counter
	gateways prometheus.Gauge
}

// NewLoadShare returns a LoadShare for the gateway, whose ID only makes the hash readable: each instance has a field of its
// own. It neither configures nor closes client. Nothing happens until Run.
func NewLoadShare(client redis.UniversalClient, gatewayID string, opts LoadOptions, log *slog.Logger, reg prometheus.Registerer) *LoadShare {
	opts = opts.withDefaults()
	f := promauto.With(reg)
	m := &loadMetrics{gateways: f.NewGauge(prometheus.GaugeOpts{
		Name: "prefixgate_load_share_gateways",
		Help: "Other gateways whose load in flight is being counted.",
	})}
	errs := f.NewCounterVec(prometheus.CounterOpts{
		Name: "prefixgate_load_share_errors_total",
		Help: "Exchanges of load in flight that failed, by kind of error.",
	}, []string{"kind"})
	for i := range m.errs {
		m.errs[i] = errs.WithLabelValues(failureNames[i])
	}
	s := &LoadShare{
		client:  client,
		opts:    opts,
		key:     opts.KeyPrefix + schemaVersion + ":load",
		field:   gatewayID + "-" + rand.Text()[:10],
		log:     log,
		metrics: m,
		seen:    make(map[string]*peer),
	}
	s.others.Store(&map[uint64]Load{})
	return s
}

// Others returns what the other gateways have in flight on the replica, as of the last exchange; zero while Redis is away.
// It does no I/O, does not allocate, and is safe for concurrent use.
func (s *LoadShare) Others(id replica.ID) Load { return (*s.others.Load())[holderKey(id)] }

// Run publishes and reads until ctx is done, then withdraws the own share. local adds to dst what this gateway has in flight;
// it is called from Run's goroutine and must not keep dst.
func (s *LoadShare) Run(ctx context.Context, local func(dst map[replica.ID]Load)) {
	own := make(map[replica.ID]Load)
	failed := 0
	wait := s.opts.Interval
	for {
		clear(own)
		local(own)
		err := s.exchange(ctx, own)
		switch {
		case ctx.Err() != nil:
		case err == nil:
			if failed >= 10 {
				s.log.Info("load of other gateways is known again", "failed_exchanges", failed)
			}
			failed, wait = 0, s.opts.Interval
		default:
			s.metrics.errs[kindOf(err)].Inc()
			if failed++; failed == 10 {
				s.log.Warn("load of other gateways is not known", "failed_exchanges", failed, "err", err)
			}
			wait = min(2*wait, max(slowestExchange, s.opts.Interval))
		}
		s.sum(time.Now())
		select {
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.opts.Timeout)
			defer cancel()
			_ = s.client.HDel(last, s.key, s.field).Err() // it fades anyway
			return
		case <-time.After(wait):
		}
	}
}

// exchange publishes the own load and reads everybody's, in one round trip.
func (s *LoadShare) exchange(ctx context.Context, own map[replica.ID]Load) error {
	ctx, cancel := context.WithTimeout(ctx, s.opts.Timeout)
	defer cancel()
	s.seq++
	pipe := s.client.Pipeline()
	pipe.HSet(ctx, s.key, s.field, encodeLoad(time.Now(), s.seq, own))
	pipe.PExpire(ctx, s.key, max(2*deadAfter, s.opts.TTL))
	all := pipe.HGetAll(ctx, s.key)
	_, err := pipe.Exec(ctx)
	fields, readErr := all.Result()
	if readErr != nil {
		if kindOf(readErr) == failWrongType {
			_ = s.client.Unlink(ctx, s.key).Err() // the next exchange tells
		}
		return readErr
	}
	now := time.Now()
	var dead []string
	for field, v := range fields {
		if field == s.field {
			continue
		}
		seq, load, ok := decodeLoad(now, v)
		p := s.seen[field]
		if p == nil {
			p = &peer{changed: now, seq: seq, load: load}
			s.seen[field] = p
		} else if ok && p.seq != seq {
			p.seq, p.load, p.changed = seq, load, now
		}
		if now.Sub(p.changed) > deadAfter {
			dead = append(dead, field)
		}
	}
	for field := range s.seen {
		if _, ok := fields[field]; !ok {
			delete(s.seen, field)
		}
	}
	if len(dead) > 0 {
		_ = s.client.HDel(ctx, s.key, dead...).Err() // or somebody else does
	}
	return err
}

// sum adds up the shares of all gateways that were heard of within the TTL.
func (s *LoadShare) sum(now time.Time) {
	total := make(map[uint64]Load)
	gateways := 0
	for _, p := range s.seen {
		if now.Sub(p.changed) > s.opts.TTL {
			continue
		}
		gateways++
		for k, l := range p.load {
			total[k] = total[k].add(l)
		}
	}
	s.metrics.gateways.Set(float64(gateways))
	s.others.Store(&total)
}

// encodeLoad writes a share: the sequence number, then for each replica its key, prefill tokens, prefills, requests, and one
// more than the milliseconds since the first prefill began, or 0. Ages, not times: clocks need not agree.
func encodeLoad(now time.Time, seq uint64, own map[replica.ID]Load) string {
	b := binary.AppendUvarint(make([]byte, 0, 10+20*len(own)), seq)
	for id, l := range own {
		if l == (Load{}) {
			continue
		}
		age := int64(0)
		if !l.Began.IsZero() {
			age = 1 + max(now.Sub(l.Began).Milliseconds(), 0)
		}
		b = binary.LittleEndian.AppendUint64(b, holderKey(id))
		b = binary.AppendUvarint(b, uint64(max(l.PrefillTokens, 0)))
		b = binary.AppendUvarint(b, uint64(max(l.Prefills, 0)))
		b = binary.AppendUvarint(b, uint64(max(l.Requests, 0)))
		b = binary.AppendUvarint(b, uint64(age))
	}
	return string(b)
}

// decodeLoad reads a share that came now. ok is false for what no gateway wrote.
func decodeLoad(now time.Time, v string) (seq uint64, load map[uint64]Load, ok bool) {
	b := []byte(v)
	uvarint := func() uint64 {
		n, size := binary.Uvarint(b)
		if size <= 0 {
			b, ok = nil, false
			return 0
		}
		b = b[size:]
		return n
	}
	ok = true
	seq = uvarint()
	load = make(map[uint64]Load)
	for ok && len(b) > 0 {
		if len(b) < 8 {
			return 0, nil, false
		}
		k := binary.LittleEndian.Uint64(b)
		b = b[8:]
		tokens := uvarint()
		prefills := uvarint()
		requests := uvarint()
		age := uvarint()
		if tokens > 1<<50 || prefills > 1<<31 || requests > 1<<31 || age > 1<<40 {
			return 0, nil, false
		}
		l := Load{PrefillTokens: int64(tokens), Prefills: int(prefills), Requests: int(requests)}
		if age > 0 {
			l.Began = now.Add(-time.Duration(age-1) * time.Millisecond)
		}
		load[k] = l
	}
	if !ok {
		return 0, nil, false
	}
	return seq, load, true
}
