// Package gateway serves clients: it is the one place where all the others come together.
//
// In go HTTP requests in the style of OpenAI's API; out go the answers of the replicas, byte for byte. Chat and completion
// requests take the way that Gateway.complete spells out: parse, encode, hash, match, pick, forward, record. Everything else
// goes to the least loaded replica. Losing a tokenizer, the index or Redis costs a request its prefix, never its answer;
// only what a replica has begun to answer is beyond repair, and then the client's connection breaks visibly.
//
// A Gateway is made by New, which binds its listeners, and served by Run, which ends after a graceful drain. Whatever New
// opened, Close closes.
package gateway

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"prefixgate/internal/block"
	"prefixgate/internal/config"
	"prefixgate/internal/index"
	"prefixgate/internal/proxy"
	"prefixgate/internal/replica"
	"prefixgate/internal/route"
	"prefixgate/internal/tokenize"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// Index knows which replica probably holds which prefix. It is safe for concurrent use.
type Index interface {
	// Match writes into dst[i] how many leading blocks of chain holders[i] is believed to hold; dst is as long as holders.
	// It returns within a few milliseconds. On an error dst holds what this gateway knows by itself, never garbage; the
	// error is for counting.
	Match(ctx context.Context, chain []block.Hash, holders []index.Holder, dst []int) error
	// Record credits a replica with all blocks of chain. It never blocks, and copies chain.
	Record(id replica.ID, chain []block.Hash)
	// Forget makes everything recorded of a replica so far nobody's.
	Forget(id replica.ID)
	// Close ends the index.
	Close() error
}

var (
	_ Index = (*index.Memory)(nil)
	_ Index = (*index.Redis)(nil)
)

// Options are what a Gateway is made of.
type Options struct {
	// Config is the configuration; New validates it.
	Config *config.Config
	// Log gets everything but the access lines. Nil discards.
	Log *slog.Logger
	// Access gets a line for each request. Nil writes none.
	Access *slog.Logger
	// Version is the program's, for the metric build_info.
	Version string
	// Getenv reads the environment. Nil means os.Getenv.
	Getenv func(string) string

	// wrap lets a test see what is registered.
	wrap func(prometheus.Registerer) prometheus.Registerer
}

// Gateway is a running gateway.
type Gateway struct {
	server  config.Server
	log     *slog.Logger
	access  *slog.Logger
	metrics *metrics

	fleet         *replica.Fleet
	index         Index
	load          *index.LoadShare // nil without Redis
	policy        route.Policy
	leastLoad     route.Policy
	explainPolicy route.Policy
	keys          policyKeys
	proxy         *proxy.Proxy
	tokenizers    *tokenizers
	remotes       []*remoteTokenizer
	catalogs      catalogs
	pending       pending
	answers       *answers
	paths         pathPolicy
	explainToken  config.Secret

	registry   prometheus.Registerer
	gatherer   prometheus.Gatherer
	public     net.Listener
	admin      net.Listener // nil if there is none
	publicHTTP *http.Server
	adminHTTP  *http.Server
	requests   context.CancelCauseFunc // breaks off what is under way
	teardown   teardown

	underWay   atomic.Int64
	loaded     atomic.Bool // the tokenizers
	reachable  atomic.Bool // a replica has been healthy, or was waited for long enough
	draining   atomic.Bool
	retryAfter time.Duration
}

// errDrained is why requests are broken off at the end of a drain.
var errDrained = errors.New("the gateway is shutting down")

// New builds a gateway and binds its listeners. It starts nothing: Run does. If it fails, nothing stays open.
func New(opts Options) (gw *Gateway, err error) {
	cfg := opts.Config
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("configuration:\n%w", err)
	}
	if opts.Getenv == nil {
		opts.Getenv = os.Getenv
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	gin.SetMode(gin.ReleaseMode)
	registry := prometheus.NewRegistry()
	var registerer prometheus.Registerer = registry
	if opts.wrap != nil {
		registerer = opts.wrap(registry)
	}
	g := &Gateway{
		server:     cfg.Server.WithDefaults(),
		log:        opts.Log,
		access:     opts.Access,
		registry:   registerer,
		gatherer:   registry,
		tokenizers: newTokenizers(cfg.Models),
		keys:       newPolicyKeys(cfg.Route),
		paths:      newPathPolicy(cfg.Server.AllowPaths),
		retryAfter: 2 * time.Second,
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.teardown.run())
			gw = nil
		}
	}()
	g.catalogs.configured = g.tokenizers.names()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))

	if err := g.newPolicies(cfg.Route); err != nil {
		return nil, err
	}
	g.metrics = newMetrics(registerer, g.policy.Name())
	g.metrics.maxFlight.Set(float64(g.server.MaxInFlight))
	g.metrics.build.WithLabelValues(opts.Version, runtime.Version()).Set(1)

	if g.fleet, err = replica.New(cfg.Fleet, g.log, registerer); err != nil {
		return nil, fmt.Errorf("fleet: %w", err)
	}
	if err := g.newIndex(cfg, opts.Getenv); err != nil {
		return nil, err
	}
	g.fleet.OnGone(g.replicaGone)
	g.teardown.add("tokenizers", g.tokenizers.close)
	g.proxy = proxy.New(cfg.Proxy)
	g.teardown.add("proxy", func() error { g.proxy.Close(); return nil })
	g.answers = newAnswers(g)
	if g.explainToken, err = readToken(cfg.Server.Explain); err != nil {
		return nil, err
	}
	if err := g.listen(); err != nil {
		return nil, err
	}
	return g, nil
}

func (g *Gateway) newPolicies(opts route.Options) error {
	var seed [8]byte
	_, _ = rand.Read(seed[:]) // it cannot fail
	for _, b := range seed {
		opts.Seed = opts.Seed<<8 | uint64(b)
	}
	policy, err := route.New(opts)
	if err != nil {
		return fmt.Errorf("route: %w", err)
	}
	explain, err := route.New(opts)
	if err != nil {
		return fmt.Errorf("route: %w", err)
	}
	opts.Policy = route.LeastLoad
	leastLoad, err := route.New(opts)
	if err != nil {
		return fmt.Errorf("route: %w", err)
	}
	g.policy, g.explainPolicy, g.leastLoad = policy, explain, leastLoad
	return nil
}

// newIndex makes the index, shared if there is a Redis to share it through. Redis need not be there yet.
func (g *Gateway) newIndex(cfg *config.Config, getenv func(string) string) error {
	url, err := cfg.Redis.Resolve(getenv)
	if err != nil {
		return err
	}
	if url == "" {
		g.index = index.NewMemory(cfg.Index, g.registry)
		g.teardown.add("index", g.index.Close)
		return nil
	}
	client, err := index.Open(url.Reveal())
	if err != nil {
		return fmt.Errorf("redis: %w", err)
	}
	g.teardown.add("redis", client.Close)
	g.index = index.NewRedis(client, cfg.Index, g.log, g.registry)
	g.teardown.add("index", g.index.Close)
	host, err := os.Hostname()
	if err != nil {
		host = "gateway"
	}
	g.load = index.NewLoadShare(client, host, cfg.LoadShare, g.log, g.registry)
	return nil
}

// readToken reads the token that guards POST /v1/explain.
func readToken(e config.Explain) (config.Secret, error) {
	if !e.Enabled || e.TokenFile == "" {
		return "", nil
	}
	b, err := os.ReadFile(e.TokenFile)
	if err != nil {
		return "", fmt.Errorf("server.explain.token_file: %w", err)
	}
	token := strings.TrimSpace(string(b))
	if token == "" {
		return "", fmt.Errorf("server.explain.token_file: %s is empty: put a token into it", e.TokenFile)
	}
	return config.Secret(token), nil
}

// listen binds the listeners and prepares their servers.
func (g *Gateway) listen() error {
	requests, cancel := context.WithCancelCause(context.Background())
	g.requests = cancel
	g.teardown.add("requests", func() error { cancel(errDrained); return nil })
	var lc net.ListenConfig
	bind := func(key, addr string, handler http.Handler) (net.Listener, *http.Server, error) {
		l, err := lc.Listen(context.Background(), "tcp", addr)
		if err != nil {
			return nil, nil, fmt.Errorf("server.%s: %w", key, err)
		}
		g.teardown.add(key, func() error {
			if err := l.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
				return err
			}
			return nil
		})
		server := &http.Server{
			Handler:           handler,
			ReadHeaderTimeout: g.server.HeaderTimeout,
			IdleTimeout:       g.server.IdleTimeout,
			MaxHeaderBytes:    g.server.MaxHeaderBytes,
			// No ReadTimeout and no WriteTimeout: bodies and answers have limits of their own, which end no healthy stream.
			BaseContext: func(net.Listener) context.Context { return requests },
			ErrorLog:    slog.NewLogLogger(g.log.With("listener", key).Handler(), slog.LevelDebug),
			Protocols:   new(http.Protocols),
		}
		server.Protocols.SetHTTP1(true)
		server.Protocols.SetUnencryptedHTTP2(g.server.H2C)
		return l, server, nil
	}
	var err error
	if g.public, g.publicHTTP, err = bind("listen", g.server.Listen, g.publicHandler()); err != nil {
		return err
	}
	if g.server.AdminListen != "" {
		if g.admin, g.adminHTTP, err = bind("admin_listen", g.server.AdminListen, g.adminHandler()); err != nil {
			return err
		}
	}
	return nil
}

// Addr is the address that clients reach; useful where the configuration asks for port 0.
func (g *Gateway) Addr() string { return g.public.Addr().String() }

// AdminAddr is the address of the operators' listener; that of the clients' if there is no other.
func (g *Gateway) AdminAddr() string {
	if g.admin == nil {
		return g.Addr()
	}
	return g.admin.Addr().String()
}

// Close closes what New opened. It is for a gateway that was never run: Run closes by itself.
func (g *Gateway) Close() error { return g.teardown.run() }

// Run serves until ctx is done, then drains: readiness fails, requests are still taken for a while, those under way end, the
// rest is broken off. It returns nil after that, or the error for which the gateway could not go on. It may be called once.
func (g *Gateway) Run(ctx context.Context) error {
	// Background work outlives ctx until the last request has ended.
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	var workers sync.WaitGroup
	failed := make(chan error, 8)
	report := func(err error) {
		if err != nil {
			failed <- err
		}
	}
	serve := func(s *http.Server, l net.Listener) {
		workers.Go(func() {
			if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				report(fmt.Errorf("serve %s: %w", l.Addr(), err))
			}
		})
	}
	serve(g.publicHTTP, g.public)
	if g.adminHTTP != nil {
		serve(g.adminHTTP, g.admin)
	}
	workers.Go(func() { report(g.fleet.Run(background)) })
	if g.load != nil {
		workers.Go(func() { g.load.Run(background, g.ownLoad) })
	}
	workers.Go(func() { g.answers.run(background) })
	workers.Go(func() { g.housekeep(background) })
	workers.Go(func() { g.awaitReplica(background) })
	workers.Go(func() { report(g.loadTokenizers(background)) })
	g.log.Info("gateway listens", "addr", g.Addr(), "admin_addr", g.AdminAddr(), "policy", g.policy.Name(), "replicas", g.fleet.Len(),
		"shared_index", g.load != nil)
	if g.fleet.Len() == 0 {
		g.log.Warn("no replicas are configured, so every request will be refused: name some with --replica or fleet.replicas")
	}

	var err error
	select {
	case <-ctx.Done():
		g.log.Info("gateway drains", "delay", g.server.DrainDelay.String(), "timeout", g.server.DrainTimeout.String())
		err = g.drain(failed)
	case err = <-failed:
		g.draining.Store(true)
		g.shutdown(0)
	}
	stop()
	workers.Wait()
	for _, r := range g.remotes {
		r.close()
	}
	err = errors.Join(err, g.teardown.run())
	g.log.Info("gateway ended")
	return err
}

// drain ends service gently. A failure of a listener meanwhile cuts it short.
func (g *Gateway) drain(failed <-chan error) (err error) {
	g.draining.Store(true)
	g.updateReady()
	// New requests are still welcome until load balancers have seen that readiness fails. Clients with a connection of
	// their own are sent to a new one, elsewhere.
	g.publicHTTP.SetKeepAlivesEnabled(false)
	timer := time.NewTimer(g.server.DrainDelay)
	defer timer.Stop()
	select {
	case <-timer.C:
	case err = <-failed:
	}
	g.shutdown(g.server.DrainTimeout)
	return err
}

// shutdown stops accepting, waits for requests under way, then breaks off the rest.
func (g *Gateway) shutdown(grace time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	servers := []*http.Server{g.publicHTTP}
	if g.adminHTTP != nil {
		servers = append(servers, g.adminHTTP)
	}
	var wg sync.WaitGroup
	for _, s := range servers {
		wg.Go(func() {
			if s.Shutdown(ctx) == nil {
				return
			}
			// Time is up. Canceled requests unwind by themselves and account for their end; what does not is cut off.
			g.requests(errDrained)
			last, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			if s.Shutdown(last) != nil {
				_ = s.Close() // its connections are being closed; there is nobody to tell
			}
		})
	}
	wg.Wait()
}

// loadTokenizers loads all tokenizers, then compares their ids with a replica's.
func (g *Gateway) loadTokenizers(ctx context.Context) error {
	for _, m := range g.tokenizers.models {
		g.metrics.modelReady.WithLabelValues(m.label).Set(0)
	}
	var mu sync.Mutex
	remotes := map[*model]*remoteTokenizer{}
	remote := func(m *model) tokenize.Remote {
		r := newRemoteTokenizer(g.fleet, g.servedNames(m))
		mu.Lock()
		defer mu.Unlock()
		remotes[m] = r
		g.remotes = append(g.remotes, r)
		return r
	}
	err := g.tokenizers.load(ctx, g.log, g.registry, remote)
	if ctx.Err() != nil {
		return nil //nolint:nilerr // the gateway ends while it loads
	}
	if err != nil {
		return err
	}
	for _, m := range g.tokenizers.models {
		if m.loaded.Load() != nil {
			g.metrics.modelReady.WithLabelValues(m.label).Set(1)
		}
	}
	g.loaded.Store(true)
	g.updateReady()
	g.selfCheck(ctx, remotes)
	return nil
}

// servedNames returns a function that tells under which names replicas serve a model; nil for a model that serves all.
func (g *Gateway) servedNames(m *model) func() map[string]bool {
	return func() map[string]bool {
		if g.tokenizers.all == m {
			return nil
		}
		names := map[string]bool{m.label: true}
		for name, e := range g.catalogs.of(g.fleet.AppendSnapshots(nil)).served {
			if e.adapter == "" && g.tokenizers.of(name, e) == m {
				names[name] = true
			}
		}
		return names
	}
}

// selfCheck compares the gateway's token ids with those of a replica and warns loudly if they differ: every prediction would
// be wrong.
func (g *Gateway) selfCheck(ctx context.Context, remotes map[*model]*remoteTokenizer) {
	var wg sync.WaitGroup
	for _, m := range g.tokenizers.models {
		if loaded := m.loaded.Load(); loaded != nil {
			wg.Go(func() { g.selfCheckModel(ctx, m, loaded, remotes[m]) })
		}
	}
	wg.Wait()
}

// selfCheckModel waits for a replica that serves the model and compares with that.
func (g *Gateway) selfCheckModel(ctx context.Context, m *model, loaded *tokenize.Model, remote tokenize.Remote) {
	ticker := time.NewTicker(250 * time.Millisecond)
	defer ticker.Stop()
	name := g.servedName(m)
	for name == "" {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		name = g.servedName(m)
	}
	differences, err := loaded.SelfCheck(ctx, remote, name)
	switch {
	case ctx.Err() != nil:
		return
	case err != nil:
		g.log.Warn("token ids could not be compared with a replica's", "model", m.label, "err", err)
	case len(differences) == 0:
		g.log.Info("token ids equal a replica's", "model", m.label)
	}
	for _, d := range differences {
		g.log.Warn("token ids differ from a replica's: prefixes will not be found; check tokenizer and chat template",
			"model", m.label, "difference", d.String())
	}
}

// servedName returns a name under which a healthy replica serves a model; empty if none does.
func (g *Gateway) servedName(m *model) string {
	for _, s := range g.fleet.AppendSnapshots(nil) {
		if !s.Healthy {
			continue
		}
		for _, served := range s.Models {
			if served.Parent == "" && g.tokenizers.of(served.ID, servedModel{base: served.ID, root: served.Root}) == m {
				return served.ID
			}
		}
	}
	return ""
}

// awaitReplica lets the gateway call itself ready once a replica is healthy, or was waited for long enough.
func (g *Gateway) awaitReplica(ctx context.Context) {
	deadline := time.NewTimer(g.server.StartupTimeout)
	defer deadline.Stop()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	var snapshots []replica.Snapshot
	for waiting := true; waiting; {
		snapshots = g.fleet.AppendSnapshots(snapshots[:0])
		for i := range snapshots {
			if snapshots[i].Healthy {
				waiting = false
			}
		}
		if !waiting {
			break
		}
		select {
		case <-ticker.C:
		case <-deadline.C:
			waiting = false
		case <-ctx.Done():
			return
		}
	}
	g.reachable.Store(true)
	g.updateReady()
}

// notReady says why the gateway should get no requests from a balancer; empty if it should. It looks at flags only.
func (g *Gateway) notReady() string {
	switch {
	case g.draining.Load():
		return "draining"
	case !g.loaded.Load():
		return "loading tokenizers"
	case !g.reachable.Load():
		return "waiting for a healthy replica"
	}
	return ""
}

func (g *Gateway) updateReady() {
	if g.notReady() == "" {
		g.metrics.ready.Set(1)
	} else {
		g.metrics.ready.Set(0)
	}
}

// housekeeping is how often what is derived from the fleet is brought up to date in metrics.
const housekeeping = time.Second

// housekeep keeps metrics that follow from the fleet up to date.
func (g *Gateway) housekeep(ctx context.Context) {
	ticker := time.NewTicker(housekeeping)
	defer ticker.Stop()
	var snapshots []replica.Snapshot
	warned := map[string]bool{}
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		snapshots = g.fleet.AppendSnapshots(snapshots[:0])
		g.checkBlockSizes(snapshots, warned)
	}
}

// checkBlockSizes shows replicas whose block size is not the configured one. Theirs is used, so routing works all the same,
// but someone meant something else.
func (g *Gateway) checkBlockSizes(snapshots []replica.Snapshot, warned map[string]bool) {
	cat := g.catalogs.of(snapshots)
	for i := range snapshots {
		s := &snapshots[i]
		if s.BlockTokens == 0 {
			continue
		}
		wrong := false
		for _, served := range s.Models {
			m := g.tokenizers.of(served.ID, cat.served[served.ID])
			if m == nil || m.config.BlockTokens == 0 {
				continue
			}
			if m.config.BlockTokens != s.BlockTokens {
				wrong = true
				if !warned[s.ID.Addr] {
					warned[s.ID.Addr] = true
					g.log.Warn("a replica's block size is not the configured one: the replica's is used", "replica", s.ID.Addr,
						"model", m.label, "configured", m.config.BlockTokens, "replica_tells", s.BlockTokens)
				}
			}
		}
		value := 0.0
		if wrong {
			value = 1
		} else {
			delete(warned, s.ID.Addr)
		}
		g.metrics.mismatch.WithLabelValues(s.ID.Addr).Set(value)
	}
}

// replicaGone is told of lives that ended: restarts and removals.
func (g *Gateway) replicaGone(id replica.ID) {
	g.index.Forget(id)
	for _, s := range g.fleet.AppendSnapshots(nil) {
		if s.ID.Addr == id.Addr {
			return
		}
	}
	g.metrics.forget(id.Addr)
}

// ownLoad tells the other gateways what this one has in flight.
func (g *Gateway) ownLoad(dst map[replica.ID]index.Load) {
	for _, s := range g.fleet.AppendSnapshots(nil) {
		if s.InFlight > 0 {
			dst[s.ID] = index.Load{PrefillTokens: s.PrefillTokens, Prefills: s.Prefills, Requests: s.InFlight, Began: s.PrefillBegan}
		}
	}
}

// othersLoad is what the other gateways have in flight on a replica; false if there are none to know of.
func (g *Gateway) othersLoad(id replica.ID) (index.Load, bool) {
	if g.load == nil {
		return index.Load{}, false
	}
	return g.load.Others(id), true
}

// residence is how long a replica is expected to keep a block that nobody touches.
func residence(s *replica.Snapshot) time.Duration {
	return index.Residence(s.NumBlocks, s.FillRate)
}
