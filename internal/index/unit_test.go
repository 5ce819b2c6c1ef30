package index

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"prefixgate/internal/block"
	"prefixgate/internal/replica"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/redis/go-redis/v9"
)

func TestResidence(t *testing.T) {
	for _, c := range []struct {
		blocks int
		rate   float64
		want   time.Duration
	}{
		{1001, 10, 100 * time.Second},
		{2001, 10, 200 * time.Second}, // an enlarged cache keeps its blocks longer
		{1001, 20, 50 * time.Second},
		{0, 10, 0},
		{1, 10, 0},
		{-5, 10, 0},
		{1001, 0, 0},
		{1001, -1, 0},
		{1001, math.NaN(), 0},
		{1001, math.Inf(1), 0},
		{1001, 1e-300, 0}, // practically for ever: the TTL limits it
		{2, 1e300, 1},     // practically nothing: not the 0 of "unlimited"
	} {
		if got := Residence(c.blocks, c.rate); got != c.want {
			t.Errorf("Residence(%d, %v) = %v, want %v", c.blocks, c.rate, got, c.want)
		}
	}
}

func TestOptionsValidate(t *testing.T) {
	if err := (Options{}).Validate(); err != nil {
		t.Errorf("the zero Options: %v", err)
	}
	if err := (LoadOptions{}).Validate(); err != nil {
		t.Errorf("the zero LoadOptions: %v", err)
	}
	err := Options{
		TTL: 1, LookupTimeout: -1, WriteTimeout: -1, RefreshInterval: -1, ProbeInterval: -1, PollInterval: -1, MaxMemoryBytes: -1,
		NearCacheBytes: -1, QueueLength: -1, BatchSize: -1, FailureThreshold: -1, KeyPrefix: "a{b",
	}.Validate()
	for _, key := range []string{
		"ttl", "lookup_timeout", "write_timeout", "refresh_interval", "probe_interval", "poll_interval", "max_memory_bytes",
		"near_cache_bytes", "queue_length", "batch_size", "failure_threshold", "key_prefix",
	} {
		if err == nil || !strings.Contains(err.Error(), key+": ") {
			t.Errorf("Validate does not name %s: %v", key, err)
		}
	}
	if err := (Options{TTL: time.Minute, RefreshInterval: 40 * time.Second}).Validate(); err == nil {
		t.Error("a refresh interval of more than half the TTL is accepted")
	}
	if err := (LoadOptions{Interval: time.Second, TTL: time.Second}).Validate(); err == nil {
		t.Error("a TTL of one interval is accepted")
	}
	if err := (LoadOptions{Interval: -1, TTL: -1, Timeout: -1}).Validate(); err == nil || strings.Count(err.Error(), "negative") != 3 {
		t.Errorf("negative durations: %v", err)
	}
}

// The heads are part of the schema: gateways that cut chains elsewhere find nothing of each other. A change here wants
// another schemaVersion.
func TestHeadsAreStable(t *testing.T) {
	want := []int{0, 32, 64, 96, 128, 160, 192, 224, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144}
	if got := appendHeads(nil, 8192); !slices.Equal(got, want) {
		t.Errorf("heads = %v, want %v", got, want)
	}
	for head := 0; head < 10_000_000; head = segmentEnd(head) {
		if n := segmentEnd(head) - head; n < firstSegment || n > longestSegment {
			t.Fatalf("the segment at %d has %d blocks", head, n)
		}
	}
}

func TestHolderKeyIsStable(t *testing.T) {
	if got, want := holderKey(replica.ID{Addr: "http://10.0.0.1:8000", Start: 5}), uint64(0xef0e5e0df804699e); got != want {
		t.Errorf("holderKey = %#x, want %#x", got, want)
	}
}

// Touches in any order give, for every depth, the time of the last touch at or beyond it; and no more claims than needed.
func TestTouch(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for range 500 {
		r := &run{path: strings.Repeat("abcd", 31)}
		var last [34]int64 // of holder 1, by blocks
		other := int64(0)
		for at := int64(1000); at < 1008; at++ {
			n := 1 + rng.IntN(32)
			r.touch(1, n, at, 0)
			last[n] = at
			if rng.IntN(3) == 0 {
				r.touch(2, 5, at, 0)
				other = at
			}
		}
		newest := int64(0)
		for n := 32; n >= 1; n-- {
			newest = max(newest, last[n])
			if newest == 0 {
				continue
			}
			if !r.covers(1, n, newest) || r.covers(1, n, newest+1) {
				t.Fatalf("%d blocks were last touched at %d; claims are %+v", n, newest, r.claims)
			}
		}
		if other > 0 && !r.covers(2, 5, other) {
			t.Fatalf("the other holder's claim is gone: %+v", r.claims)
		}
		seen := map[uint64]claim{}
		for _, c := range r.claims {
			if prev, ok := seen[c.holder]; ok && (c.blocks >= prev.blocks || c.at <= prev.at) {
				t.Fatalf("claims out of order: %+v", r.claims)
			}
			seen[c.holder] = c
		}
	}
}

func TestTouchKeepsFewSteps(t *testing.T) {
	r := &run{path: strings.Repeat("abcd", 99)}
	for i := range 90 {
		r.touch(1, 100-i, int64(1000+i), 0)
	}
	if len(r.claims) > maxSteps {
		t.Errorf("%d claims of one holder, want at most %d", len(r.claims), maxSteps)
	}
	if !r.covers(1, 100, 1000) || !r.covers(1, 11, 1089) {
		t.Errorf("the deepest and the newest claim do not both live: %+v", r.claims)
	}
	for _, c := range r.claims {
		if c.at != int64(1000+100-int(c.blocks)) {
			t.Errorf("claim %+v says more than was touched", c)
		}
	}
	r.touch(2, 3, 1200, 1150)
	if len(r.claims) != 1 {
		t.Errorf("expired claims are kept: %+v", r.claims)
	}
}

func TestNestedOffsetsAreBounded(t *testing.T) {
	r := &run{}
	for i := range 100 {
		r.remember(i)
	}
	if len(r.nested) != maxNested || r.nested[maxNested-1] != 99 {
		t.Errorf("nested = %v, want the %d last", r.nested, maxNested)
	}
	if r.remember(99) {
		t.Error("a fresh offset is written again")
	}
	if !r.remember(int(r.nested[0])) {
		t.Error("an old offset that is in use is not written again")
	}
}

func TestDecodeRun(t *testing.T) {
	r := &run{path: "aaaabbbb", nested: []uint16{3, 700}}
	r.touch(7, 3, 1_796_088_447_123, 0)
	r.touch(7, 2, 1_796_088_447_999, 0)
	r.touch(1<<63+5, 1, 1, 0)
	values := []string{
		encodeClaims(r.claims, 7), encodePath(r.path), "", encodeNested(r.nested), encodeClaims(r.claims, 1<<63+5), "x", "h1234567",
	}
	got := decodeRun(values)
	byHolder := func(a, b claim) int { return int(a.holder>>1) - int(b.holder>>1) }
	slices.SortStableFunc(got.claims, byHolder)
	slices.SortStableFunc(r.claims, byHolder)
	if got.path != r.path || !slices.Equal(got.nested, r.nested) || !slices.Equal(got.claims, r.claims) {
		t.Errorf("decodeRun of an encoded run = %+v, want %+v", got, r)
	}
	if decodeRun(nil) != nil {
		t.Error("decodeRun of nothing is a run")
	}
}

// Whatever is under our keys, nothing is credited beyond the chain, and nothing panics.
func FuzzDecodeRun(f *testing.F) {
	f.Add("paaaa", "h123456780123456789")
	f.Add("n\x01\x00\x02", "h12345678"+strings.Repeat("\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00", 13))
	f.Fuzz(func(t *testing.T, v1, v2 string) {
		r := decodeRun([]string{v1, v2})
		chain := make([]block.Hash, 40)
		for i := range chain {
			chain[i] = block.Hash(i)
		}
		shared := r.follow(chain, 0, 32)
		if shared < 1 || shared > 32 || shared > r.blocks() {
			t.Fatalf("follow = %d of a run of %d", shared, r.blocks())
		}
		for _, c := range r.claims {
			if r.valid(c) && int(c.blocks) > r.blocks() {
				t.Fatalf("claim %+v on a run of %d blocks is valid", c, r.blocks())
			}
		}
		r.clone().touch(5, shared, 1, 0)
	})
}

func TestKindOf(t *testing.T) {
	reply := func(s string) error { return fmt.Errorf("look up: %w", replyError(s)) }
	for _, c := range []struct {
		err  error
		want failure
	}{
		{context.DeadlineExceeded, failTimeout},
		{fmt.Errorf("x: %w", os.ErrDeadlineExceeded), failTimeout},
		{redis.ErrPoolTimeout, failTimeout},
		{&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, failNetwork},
		{&net.DNSError{Err: "no such host", IsNotFound: true}, failNetwork},
		{io.EOF, failNetwork},
		{errors.New("odd"), failNetwork},
		{reply("LOADING Redis is loading the dataset in memory"), failLoading},
		{reply("READONLY You can't write against a read only replica."), failReadOnly},
		{reply("OOM command not allowed when used memory > 'maxmemory'."), failFull},
		{reply("WRONGTYPE Operation against a key holding the wrong kind of value"), failWrongType},
		{reply("NOAUTH Authentication required."), failAuth},
		{reply("WRONGPASS invalid username-password pair or user is disabled."), failAuth},
		{reply("NOPERM this user has no permissions"), failAuth},
		{reply("CLUSTERDOWN The cluster is down"), failCluster},
		{reply("MOVED 3999 127.0.0.1:6381"), failCluster},
		{reply("ASK 3999 127.0.0.1:6381"), failCluster},
		{reply("TRYAGAIN Multiple keys request during rehashing of slot"), failCluster},
		{reply("CROSSSLOT Keys in request don't hash to the same slot"), failCluster},
		{reply("MASTERDOWN Link with MASTER is down"), failLoading},
		{reply("ERR something"), failReply},
	} {
		if got := kindOf(c.err); got != c.want {
			t.Errorf("kindOf(%v) = %s, want %s", c.err, failureNames[got], failureNames[c.want])
		}
	}
}

type replyError string

func (e replyError) Error() string { return string(e) }
func (replyError) RedisError()     {}

func TestMetricsRegisterOnce(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	NewMemory(Options{}, reg)
	if _, err := reg.Gather(); err != nil {
		t.Error(err)
	}
}

// The first answer of Redis, told late, used to set redis_up of a Redis that had been lost meanwhile.
func TestTheFirstAnswerToldLate(t *testing.T) {
	reg := prometheus.NewRegistry()
	m := newMetrics(reg)
	m.withRedis(reg)
	h := newHealth(1, time.Hour, slog.New(slog.DiscardHandler), m)
	h.outcome(errors.New("connection refused"))
	h.meet(nil) // of an exchange before that
	if up := testutil.ToFloat64(m.up); up != 0 || h.usable() {
		t.Errorf("redis_up = %v while Redis is left alone", up)
	}
	h = newHealth(1, time.Hour, slog.New(slog.DiscardHandler), m)
	h.outcome(nil)
	if up := testutil.ToFloat64(m.up); up != 1 {
		t.Errorf("redis_up = %v after the first answer, want 1", up)
	}
}
