// Command bench-index measures the index against a redis-server that it starts itself, and against a naive shared index
// that asks Redis one command for each block, as other gateways do. It prints a line `name value unit` per figure:
//
//	lookup/<memory|near|redis|naive>/<blocks>x<replicas>/<p50|p99>   time of one lookup
//	commands/..., sent/..., received/..., redis-cpu/...              of one lookup or record, as Redis counts them
//	bytes/<memory|redis|naive>                                       per distinct block, each held by 4 replicas
//	speedup/<blocks>x<replicas>                                      naive p50 over redis p50
//
// "redis" is a gateway that has just started: its near cache is empty for every lookup. Half of the lookups continue a recorded
// prompt, half fork off one.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"prefixgate/internal/block"
	"prefixgate/internal/index"
	"prefixgate/internal/replica"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9" //nolint:depguard // the naive index is written against the client itself
)

func main() {
	os.Exit(run())
}

func run() int {
	blocks := flag.Int("blocks", 1_000_000, "distinct blocks for the memory figures")
	budget := flag.Duration("time", time.Second, "time to spend on each lookup figure")
	flag.Parse()
	addr, stop, err := startRedis()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench-index:", err)
		return 1
	}
	defer stop()
	b := bench{budget: *budget, rng: rand.New(rand.NewPCG(1, 2))}
	if o, optErr := index.ParseURL("redis://" + addr); optErr != nil {
		err = optErr
	} else {
		// A busy machine makes a figure worse, not an error.
		o.ReadTimeout, o.WriteTimeout = time.Minute, time.Minute
		b.client = redis.NewUniversalClient(o)
		err = errors.Join(b.lookups(), b.memory(*blocks))
		_ = b.client.Close()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench-index:", err)
		return 1
	}
	return 0
}

// startRedis starts a redis-server without persistence on a free port.
func startRedis() (addr string, stop func(), err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // returns at once
	if err != nil {
		return "", nil, fmt.Errorf("find a free port: %w", err)
	}
	addr = l.Addr().String()
	_ = l.Close()
	_, port, _ := net.SplitHostPort(addr)
	dir, err := os.MkdirTemp("", "bench-index")
	if err != nil {
		return "", nil, fmt.Errorf("make a folder: %w", err)
	}
	cmd := exec.Command("redis-server", "--port", port, "--bind", "127.0.0.1", "--dir", dir, "--save", "", "--appendonly", "no") //nolint:noctx // killed by stop
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return "", nil, fmt.Errorf("start redis-server (scripts/setup.sh installs it): %w", err)
	}
	stop = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = os.RemoveAll(dir)
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if strings.Contains(lines.Text(), "eady to accept connections") {
			go func() {
				for lines.Scan() {
					continue
				}
			}()
			return addr, stop, nil
		}
	}
	stop()
	return "", nil, errors.New("redis-server ended before it was ready")
}

type bench struct {
	client redis.UniversalClient
	budget time.Duration
	rng    *rand.Rand
}

func (b *bench) chain(n int) []block.Hash {
	c := make([]block.Hash, n)
	for i := range c {
		c[i] = block.Hash(b.rng.Uint64())
	}
	return c
}

func holders(n int) []index.Holder {
	h := make([]index.Holder, n)
	for i := range h {
		h[i].ID = replica.ID{Addr: fmt.Sprintf("http://10.0.0.%d:8000", i), Start: 1_796_088_447_000_000}
	}
	return h
}

// options give lookups all the time they need: a benchmark measures it, and must not cut it off.
func options() index.Options {
	return index.Options{LookupTimeout: time.Minute, WriteTimeout: time.Minute, RefreshInterval: 10 * time.Minute}
}

func newRedis(client redis.UniversalClient, opts index.Options) *index.Redis {
	return index.NewRedis(client, opts, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
}

// prompt is what one lookup asks for.
type prompt struct {
	chain []block.Hash
	want  []int
}

func (b *bench) lookups() error {
	ctx := context.Background()
	for _, n := range []int{256, 1024, 6250} {
		for _, replicas := range []int{1, 8, 64} {
			if err := b.client.FlushAll(ctx).Err(); err != nil {
				return err
			}
			size := fmt.Sprintf("%dx%d", n, replicas)
			hs := holders(replicas)
			mem := index.NewMemory(options(), prometheus.NewRegistry())
			writer := newRedis(b.client, options())
			naive := naive{b.client}
			var prompts []prompt
			for i := range 8 {
				// Each replica holds another part of the prompt.
				c := b.chain(n)
				p := prompt{c, make([]int, replicas)}
				for r, h := range hs {
					p.want[r] = n * (r + 1) / replicas
					mem.Record(h.ID, c[:p.want[r]])
					writer.Record(h.ID, c[:p.want[r]])
					if err := naive.record(ctx, h.ID, c[:p.want[r]]); err != nil {
						return err
					}
				}
				if i%2 == 1 {
					keep := n/2 + b.rng.IntN(n/2)
					p.chain = append(slices.Clone(c[:keep]), b.chain(n-keep)...)
					for r := range p.want {
						p.want[r] = min(p.want[r], keep)
					}
				}
				prompts = append(prompts, p)
			}
			if err := writer.Flush(ctx); err != nil {
				return err
			}
			_ = writer.Close()

			if _, err := b.measure("lookup/memory/"+size, prompts, replicas, func(p prompt, dst []int) error {
				return mem.Match(ctx, p.chain, hs, dst)
			}); err != nil {
				return err
			}

			opts := options()
			opts.NearCacheStaleness = time.Hour
			near := newRedis(b.client, opts)
			for _, p := range prompts {
				if err := near.Match(ctx, p.chain, hs, make([]int, replicas)); err != nil {
					return err
				}
			}
			if _, err := b.measure("lookup/near/"+size, prompts, replicas, func(p prompt, dst []int) error {
				return near.Match(ctx, p.chain, hs, dst)
			}); err != nil {
				return err
			}
			_ = near.Close()

			opts = options()
			opts.NearCacheBytes = 1 // nothing fits
			opts.NearCacheStaleness = -1
			opts.PollInterval = time.Hour
			cold := newRedis(b.client, opts)
			fast, err := b.measure("lookup/redis/"+size, prompts, replicas, func(p prompt, dst []int) error {
				return cold.Match(ctx, p.chain, hs, dst)
			})
			if err != nil {
				return err
			}
			if err := b.count("lookup/redis/"+size, len(prompts), func() error {
				for _, p := range prompts {
					if err := cold.Match(ctx, p.chain, hs, make([]int, replicas)); err != nil {
						return err
					}
				}
				return nil
			}); err != nil {
				return err
			}
			_ = cold.Close()

			slow, err := b.measure("lookup/naive/"+size, prompts, replicas, func(p prompt, dst []int) error {
				return naive.match(ctx, p.chain, hs, dst)
			})
			if err != nil {
				return err
			}
			if err := b.count("lookup/naive/"+size, len(prompts), func() error {
				for _, p := range prompts {
					if err := naive.match(ctx, p.chain, hs, make([]int, replicas)); err != nil {
						return err
					}
				}
				return nil
			}); err != nil {
				return err
			}
			fmt.Fprintf(os.Stdout, "speedup/%s %.0f x\n", size, float64(slow)/float64(fast))
		}
		if err := b.records(n); err != nil {
			return err
		}
	}
	return nil
}

// records counts what a new prompt, and the same prompt touched again, cost.
func (b *bench) records(n int) error {
	ctx := context.Background()
	opts := options()
	opts.PollInterval = time.Hour
	x := newRedis(b.client, opts)
	defer x.Close()
	h := holders(1)
	const times = 20
	var chains [][]block.Hash
	for range times {
		chains = append(chains, b.chain(n))
	}
	all := func() error {
		for _, c := range chains {
			if err := x.Match(ctx, c, h, make([]int, 1)); err != nil {
				return err
			}
			x.Record(h[0].ID, c)
		}
		return x.Flush(ctx)
	}
	if err := b.count(fmt.Sprintf("lookup+record/redis/%d/new", n), times, all); err != nil {
		return err
	}
	if err := b.count(fmt.Sprintf("lookup+record/redis/%d/again", n), times, all); err != nil {
		return err
	}
	for i, c := range chains {
		chains[i] = append(c, b.chain(20)...)
	}
	if err := b.count(fmt.Sprintf("lookup+record/redis/%d/grown", n), times, all); err != nil {
		return err
	}
	return b.count(fmt.Sprintf("record/naive/%d/new", n), times, func() error {
		for range times {
			if err := (naive{b.client}).record(ctx, h[0].ID, b.chain(n)); err != nil {
				return err
			}
		}
		return nil
	})
}

// measure times lookups for a while, after one of each that is checked and not timed, and returns the median.
func (b *bench) measure(name string, prompts []prompt, replicas int, match func(p prompt, dst []int) error) (time.Duration, error) {
	dst := make([]int, replicas)
	for _, p := range prompts {
		if err := match(p, dst); err != nil {
			return 0, fmt.Errorf("%s: %w", name, err)
		}
		if !slices.Equal(dst, p.want) {
			return 0, fmt.Errorf("%s: found %v, want %v", name, dst, p.want)
		}
	}
	runtime.GC()
	var times []time.Duration
	for end := time.Now().Add(b.budget); len(times) < 20 || time.Now().Before(end); {
		p := prompts[len(times)%len(prompts)]
		start := time.Now()
		if err := match(p, dst); err != nil {
			return 0, fmt.Errorf("%s: %w", name, err)
		}
		times = append(times, time.Since(start))
	}
	slices.Sort(times)
	ms := func(d time.Duration) float64 { return d.Seconds() * 1e3 }
	p50, p99 := times[len(times)/2], times[len(times)*99/100]
	fmt.Fprintf(os.Stdout, "%s/p50 %.4f ms\n%s/p99 %.4f ms\n", name, ms(p50), name, ms(p99))
	return p50, nil
}

// stats are Redis' own counters.
type stats struct {
	commands, in, out int64
	cpu               float64
}

func (b *bench) stats() (stats, error) {
	info, err := b.client.Info(context.Background(), "stats", "cpu", "memory").Result()
	if err != nil {
		return stats{}, err
	}
	number := func(field string) float64 {
		_, rest, _ := strings.Cut(info, field+":")
		v, _, _ := strings.Cut(rest, "\r\n")
		f, _ := strconv.ParseFloat(v, 64)
		return f
	}
	return stats{
		commands: int64(number("total_commands_processed")),
		in:       int64(number("total_net_input_bytes")),
		out:      int64(number("total_net_output_bytes")),
		cpu:      number("used_cpu_user") + number("used_cpu_sys"),
	}, nil
}

// count prints what fn, which does something times times, costs by Redis' counters.
func (b *bench) count(name string, times int, fn func() error) error {
	before, err := b.stats()
	if err != nil {
		return err
	}
	if err := fn(); err != nil {
		return err
	}
	after, err := b.stats()
	if err != nil {
		return err
	}
	n := float64(times)
	// One of the commands is the reading of the counters, and its answer a few kilobytes: both left out.
	fmt.Fprintf(os.Stdout, "commands/%s %.1f commands\n", name, float64(after.commands-before.commands-1)/n)
	fmt.Fprintf(os.Stdout, "sent/%s %.0f B\n", name, float64(after.in-before.in)/n)
	fmt.Fprintf(os.Stdout, "received/%s %.0f B\n", name, max(float64(after.out-before.out)-4096, 0)/n)
	fmt.Fprintf(os.Stdout, "redis-cpu/%s %.0f us\n", name, (after.cpu-before.cpu)*1e6/n)
	return nil
}

// memory fills indexes with conversations until they hold blocks distinct blocks, each on 4 replicas.
func (b *bench) memory(blocks int) error {
	ctx := context.Background()
	hs := holders(4)
	used := func() (int64, error) {
		info, err := b.client.InfoMap(ctx, "memory").Result()
		if err != nil {
			return 0, err
		}
		return strconv.ParseInt(info["Memory"]["used_memory"], 10, 64)
	}
	heap := func() int64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	// conversations calls fn with every turn of every conversation: a system prompt shared by 50 of them, then 1 to 8 turns
	// of 4 to 60 blocks each.
	conversations := func(total int, fn func(chain []block.Hash) error) (int, error) {
		made := 0
		var system []block.Hash
		for i := 0; made < total; i++ {
			if i%50 == 0 {
				system = b.chain(10 + b.rng.IntN(150))
				made += len(system)
			}
			c := slices.Clone(system)
			for range 1 + b.rng.IntN(8) {
				turn := 4 + b.rng.IntN(57)
				c = append(c, b.chain(turn)...)
				made += turn
				if err := fn(c); err != nil {
					return 0, err
				}
			}
		}
		return made, nil
	}

	opts := options()
	opts.MaxMemoryBytes = 1 << 40
	before := heap()
	mem := index.NewMemory(opts, prometheus.NewRegistry())
	made, err := conversations(blocks, func(c []block.Hash) error {
		for _, h := range hs {
			mem.Record(h.ID, c)
		}
		return nil
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stdout, "bytes/memory %.1f B/block\n", float64(heap()-before)/float64(made))
	runtime.KeepAlive(mem)

	if err := b.client.FlushAll(ctx).Err(); err != nil {
		return err
	}
	empty, err := used()
	if err != nil {
		return err
	}
	x := newRedis(b.client, options())
	defer x.Close()
	queued := 0
	made, err = conversations(blocks, func(c []block.Hash) error {
		for _, h := range hs {
			x.Record(h.ID, c)
		}
		if queued += len(hs); queued > 2000 {
			queued = 0
			return x.Flush(ctx)
		}
		return nil
	})
	if err == nil {
		err = x.Flush(ctx)
	}
	if err != nil {
		return err
	}
	full, err := used()
	if err != nil {
		return err
	}
	keys, err := b.client.DBSize(ctx).Result()
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stdout, "bytes/redis %.1f B/block\n", float64(full-empty)/float64(made))
	fmt.Fprintf(os.Stdout, "keys/redis %.3f keys/block\n", float64(keys)/float64(made))

	if err := b.client.FlushAll(ctx).Err(); err != nil {
		return err
	}
	if empty, err = used(); err != nil {
		return err
	}
	sample := min(blocks, 100_000)
	for done := 0; done < sample; done += 1000 {
		c := b.chain(1000)
		for i := range hs {
			if err := (naive{b.client}).record(ctx, hs[i].ID, c); err != nil {
				return err
			}
		}
	}
	if full, err = used(); err != nil {
		return err
	}
	fmt.Fprintf(os.Stdout, "bytes/naive %.1f B/block\n", float64(full-empty)/float64(sample))
	return nil
}

// naive is the shared index as others build it: for each block a hash whose fields are the replicas that hold it, with where they
// hold it. A lookup asks for every block's fields in one pipeline, makes a list of replicas of each, and counts how far each
// replica's blocks follow one another.
type naive struct{ client redis.UniversalClient }

func naiveKey(h block.Hash) string { return "naive:" + strconv.FormatUint(uint64(h), 10) }

// naiveHolder is what a block's list says of one replica.
type naiveHolder struct{ replica, tier string }

func (n naive) record(ctx context.Context, id replica.ID, chain []block.Hash) error {
	pipe := n.client.Pipeline()
	for _, h := range chain {
		pipe.HSet(ctx, naiveKey(h), id.Addr+"@gpu", "")
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return fmt.Errorf("naive record: %w", err)
	}
	return nil
}

func (n naive) match(ctx context.Context, chain []block.Hash, holders []index.Holder, dst []int) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	pipe := n.client.Pipeline()
	cmds := make([]*redis.StringSliceCmd, len(chain))
	for i, h := range chain {
		cmds[i] = pipe.HKeys(ctx, naiveKey(h))
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return fmt.Errorf("naive match: %w", err)
	}
	lists := make(map[block.Hash][]naiveHolder)
	for i, c := range cmds {
		var list []naiveHolder
		for _, name := range c.Val() {
			addr, tier, _ := strings.Cut(name, "@")
			list = append(list, naiveHolder{addr, tier})
		}
		if len(list) == 0 {
			break // nobody has a later one
		}
		lists[chain[i]] = list
	}
	at := make(map[string]int, len(holders))
	for i, h := range holders {
		at[h.ID.Addr] = i
	}
	clear(dst)
	for i, h := range chain {
		for _, holder := range lists[h] {
			if r, ok := at[holder.replica]; ok && dst[r] == i {
				dst[r]++
			}
		}
	}
	return nil
}
