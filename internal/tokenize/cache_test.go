package tokenize

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
)

func newTestCache(maxBytes int64) *chunkCache {
	return newChunkCache(maxBytes, newMetrics(nil, "m").chunkCache)
}

func entryOf(c *chunkCache, text string, ahead int, ids ...uint32) *cacheEntry {
	return &cacheEntry{text: text, ids: ids, hash: c.key(text, ahead), ahead: ahead}
}

// Two chunks of one hash are two chunks: the text decides.
func TestCacheTrustsNoHash(t *testing.T) {
	c := newTestCache(1 << 20)
	e := entryOf(c, "some text", 0, 1)
	c.put(e)
	if got := c.get(e.hash, "some text", 0); got != e {
		t.Errorf("get of what was put = %v", got)
	}
	if got := c.get(e.hash, "else text", 0); got != nil {
		t.Errorf("get of another text with the same hash = %v, want nothing", got)
	}
	if got := c.get(e.hash, "some text", 2); got != nil {
		t.Errorf("get of the same text with another look-ahead = %v, want nothing", got)
	}
	other := &cacheEntry{text: "else text", ids: []uint32{2}, hash: e.hash}
	c.put(other)
	if got := c.get(e.hash, "else text", 0); got != other {
		t.Errorf("get of the later entry = %v", got)
	}
	if got := c.get(e.hash, "some text", 0); got != nil {
		t.Errorf("get of the entry that was replaced = %v, want nothing", got)
	}
	if got := testutil.ToFloat64(c.metrics.entries); got != 1 {
		t.Errorf("entries = %v, want 1", got)
	}
	c.close()
	if bytes, entries := testutil.ToFloat64(c.metrics.bytes), testutil.ToFloat64(c.metrics.entries); bytes != 0 || entries != 0 {
		t.Errorf("after close: %v bytes, %v entries, want none", bytes, entries)
	}
}

// The bound holds at every moment, the gauges say what is there, and what is asked for stays while a flood passes.
func TestCacheKeepsItsBound(t *testing.T) {
	const limit = 1 << 20
	c := newTestCache(limit)
	hot := make([]*cacheEntry, 50)
	for i := range hot {
		hot[i] = entryOf(c, fmt.Sprintf("hot %d %s", i, strings.Repeat("x", 500)), 2, make([]uint32, 100)...)
		c.put(hot[i])
	}
	rng := rand.New(rand.NewPCG(1, 1))
	for i := range 20_000 {
		c.put(entryOf(c, strconv.Itoa(i)+strings.Repeat("y", rng.IntN(2000)), 0, make([]uint32, rng.IntN(500))...))
		if i%20 == 0 {
			for _, e := range hot {
				c.get(e.hash, e.text, e.ahead)
			}
		}
	}
	var bytes int64
	entries := 0
	for i := range c.shards {
		s := &c.shards[i]
		if s.bytes > s.max {
			t.Errorf("shard %d has %d bytes, its bound is %d", i, s.bytes, s.max)
		}
		var sum int64
		for slot, e := range s.ring {
			if e.slot != slot || s.entries[e.hash] != e {
				t.Fatalf("shard %d: the ring and the map disagree about slot %d", i, slot)
			}
			sum += e.cost()
		}
		if sum != s.bytes || len(s.ring) != len(s.entries) {
			t.Errorf("shard %d counts %d bytes in %d entries, has %d in %d", i, s.bytes, len(s.entries), sum, len(s.ring))
		}
		bytes += s.bytes
		entries += len(s.ring)
	}
	if got := testutil.ToFloat64(c.metrics.bytes); got != float64(bytes) {
		t.Errorf("gauge says %v bytes, the shards have %d", got, bytes)
	}
	if got := testutil.ToFloat64(c.metrics.entries); got != float64(entries) {
		t.Errorf("gauge says %v entries, the shards have %d", got, entries)
	}
	kept := 0
	for _, e := range hot {
		if c.get(e.hash, e.text, e.ahead) == e {
			kept++
		}
	}
	if kept < len(hot)*9/10 {
		t.Errorf("%d of %d entries in use survived a flood, want nearly all", kept, len(hot))
	}
}

func TestCacheOffKeepsNothing(t *testing.T) {
	c := newTestCache(-1)
	e := entryOf(c, "x", 0, 1)
	c.put(e)
	if got := c.get(e.hash, "x", 0); got != nil {
		t.Errorf("get from a cache that is off = %v", got)
	}
	m := load(t, Options{Model: demoModel(), CacheBytes: -1})
	for range 2 {
		if ids, err := m.encodeText(t.Context(), nil, "without a cache", false, 0); err != nil || len(ids) == 0 {
			t.Errorf("encode without a cache = %v, %v", ids, err)
		}
	}
}

// A prompt seen before is not encoded again; a conversation's next turn costs its new message; a document is found in the
// middle of other prompts.
func TestOnlyNewTextIsEncoded(t *testing.T) {
	m := load(t, Options{Model: demoModel(), Name: "m", Timeout: time.Minute})
	maker := newTextMaker(t, 11)
	encoded := func(text string) float64 {
		t.Helper()
		before := testutil.ToFloat64(m.metrics.encodedBytes)
		if _, err := m.encodeText(t.Context(), nil, text, false, 0); err != nil {
			t.Fatal(err)
		}
		return testutil.ToFloat64(m.metrics.encodedBytes) - before
	}
	message := func(n int) string { return "<|pg_role|>user<|pg_text|>" + maker.text(n) + "<|pg_end|>" }

	talk := message(100_000)
	if got := encoded(talk); got != float64(len(talk)) {
		t.Errorf("a new prompt of %d bytes costs %v", len(talk), got)
	}
	if got := encoded(talk); got != 0 {
		t.Errorf("a seen prompt costs %v bytes, want none", got)
	}
	for range 20 {
		next := message(1000)
		talk += next
		if got, most := encoded(talk), float64(len(next)+2*maxChunk); got > most {
			t.Errorf("a next message of %d bytes costs %v, want at most %v", len(next), got, most)
		}
	}
	for range 5 {
		document := maker.text(60_000)
		encoded("<|pg_role|>system<|pg_text|>" + maker.text(1500) + document)
		around := maker.text(700+maker.rng.IntN(3000)) + "\n"
		if got, most := encoded(around+document+maker.text(500)), float64(len(around)+500+12*maxChunk); got > most {
			t.Errorf("a document of 60 kB seen elsewhere costs %v bytes, want at most %v", got, most)
		}
	}
}

// Hundreds of thousands of different prompts must leave the process within what the configuration says. By default a few go
// through; PREFIXGATE_MEMORY_PROMPTS=500000 PREFIXGATE_MEMORY_TOKENIZER=qwen3 is the full run, of some minutes.
func TestMemoryStaysBounded(t *testing.T) {
	prompts, name, limit := 1000, "prefixgate-demo", int64(4<<20)
	if v := os.Getenv("PREFIXGATE_MEMORY_PROMPTS"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil {
			t.Fatal(err)
		}
		prompts, limit = n, 256<<20
	}
	if v := os.Getenv("PREFIXGATE_MEMORY_TOKENIZER"); v != "" {
		name = v
	}
	const workers = 2
	m := load(t, Options{Model: tokenizerPath(t, name), CacheBytes: limit, Workers: workers, Timeout: time.Minute})
	maker := newTextMaker(t, 12)
	pages := make([]string, 32)
	for i := range pages {
		pages[i] = maker.text(1000)
	}
	debug.FreeOSMemory()
	base := residentBytes(t)
	var half, most int64
	tokens := 0
	var b strings.Builder
	for i := range prompts {
		b.Reset()
		for j, page := range pages { // new from its first to its last chunk
			b.WriteString("\n\nPage ")
			b.WriteString(strconv.Itoa(i*len(pages) + j))
			b.WriteString(page)
		}
		ids, err := m.encodeText(context.Background(), nil, b.String(), false, 0)
		if err != nil {
			t.Fatal(err)
		}
		tokens += len(ids)
		if i%max(1, prompts/100) == 0 {
			most = max(most, residentBytes(t)-base)
		}
		if i == prompts/2 {
			half = residentBytes(t) - base
		}
	}
	runtime.GC()
	end := residentBytes(t) - base
	t.Logf("%d prompts of %d tokens each: resident memory grew by %d MiB, at most %d, %d at half; cache %d of %d MiB", prompts, tokens/prompts, end>>20, most>>20, half>>20,
		int64(testutil.ToFloat64(m.metrics.chunkCache.bytes))>>20, limit>>20)
	// Each thread of the encoder has its own caches; the rest of the process needs a little, too.
	if most := max(most, end); most > limit+workers*threadCacheBytes+(32<<20) {
		t.Errorf("memory grew by %d MiB", most>>20)
	}
	if end > half+half/10+(8<<20) {
		t.Errorf("memory grew from %d to %d MiB in the second half", half>>20, end>>20)
	}
	if got := int64(testutil.ToFloat64(m.metrics.chunkCache.bytes)); got > limit {
		t.Errorf("cache has %d bytes, its bound is %d", got, limit)
	}
}

// threadCacheBytes bounds what an encoder's thread keeps, see Options.Workers.
const threadCacheBytes = 100 << 20

// residentBytes returns the resident memory of this process.
func residentBytes(tb testing.TB) int64 {
	tb.Helper()
	data, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		tb.Skip("no /proc here")
	}
	fields := strings.Fields(string(data))
	pages, err := strconv.ParseInt(fields[1], 10, 64)
	if err != nil {
		tb.Fatal(err)
	}
	return pages * int64(os.Getpagesize())
}

func TestOptionsValidate(t *testing.T) {
	bad := Options{Mode: "x", Encoder: "y", ContentFormat: "z", Timeout: -1, CacheBytes: 5, RemoteCacheBytes: -2, Workers: -1, RemoteConcurrency: -1}
	err := bad.Validate()
	if err == nil {
		t.Fatal("Validate of wrong options = no error")
	}
	for _, key := range []string{"model:", "mode:", "encoder:", "chat_template_content_format:", "timeout:", "cache_bytes:", "remote_cache_bytes:", "workers:", "remote_concurrency:"} {
		if !slices.ContainsFunc(strings.Split(err.Error(), "\n"), func(line string) bool { return strings.HasPrefix(line, key) }) {
			t.Errorf("Validate does not name %s in %q", key, err)
		}
	}
	good := Options{Model: "m"}
	if err := good.Validate(); err != nil {
		t.Errorf("Validate of the zero options with a model = %v", err)
	}
	if got := good.withDefaults(); got.Mode != ModeAuto || got.Timeout != DefaultTimeout || got.CacheBytes != DefaultCacheBytes || got.Workers < 1 || got.Name != "m" {
		t.Errorf("withDefaults = %+v", got)
	}
}
