package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"prefixgate/internal/config"
	"prefixgate/internal/replica"
	"prefixgate/internal/tokenize"

	"github.com/prometheus/client_golang/prometheus"
)

// model is a configured model. Until its tokenizer is loaded, and for good where that failed and the configuration allows
// it, its requests are routed by load.
type model struct {
	config config.Model
	label  string
	loaded atomic.Pointer[tokenize.Model]
	failed atomic.Bool
}

// tokenizers are the configured models by the names under which they are known.
type tokenizers struct {
	models []*model
	byName map[string]*model
	// all serves every name: the only model, without a name of its own.
	all *model
	// aliases are names of clients and what replicas call them.
	aliases map[string]string
}

func newTokenizers(models []config.Model) *tokenizers {
	t := &tokenizers{byName: map[string]*model{}, aliases: map[string]string{}}
	for _, c := range models {
		m := &model{config: c, label: c.Name}
		if m.label == "" {
			m.label = c.Tokenizer.Model
		}
		t.models = append(t.models, m)
		if c.Name == "" && len(models) == 1 {
			t.all = m
			continue
		}
		t.byName[m.label] = m
		for _, alias := range c.Aliases {
			t.aliases[alias] = c.Name
		}
	}
	return t
}

// names returns the names that have a label of their own in metrics.
func (t *tokenizers) names() map[string]bool {
	names := map[string]bool{}
	for name := range t.byName {
		names[name] = true
	}
	return names
}

// of returns the model for one that is served under a name; nil if none is configured.
func (t *tokenizers) of(name string, e servedModel) *model {
	if t.all != nil {
		return t.all
	}
	for _, n := range [...]string{name, e.base, e.root} {
		if m := t.byName[n]; m != nil {
			return m
		}
	}
	return nil
}

// load loads all tokenizers, at the same time, and returns when the last is loaded or has failed. An error of a model that
// must not fail is returned.
func (t *tokenizers) load(ctx context.Context, log *slog.Logger, reg prometheus.Registerer, remote func(*model) tokenize.Remote) error {
	var wg sync.WaitGroup
	errs := make([]error, len(t.models))
	for i, m := range t.models {
		wg.Go(func() {
			opts := m.config.Tokenizer
			opts.Name = m.label
			opts.Remote = remote(m)
			loaded, err := tokenize.Load(ctx, opts, log, reg)
			switch {
			case err == nil:
				m.loaded.Store(loaded)
			case ctx.Err() != nil:
				errs[i] = ctx.Err()
			case m.config.OnError == config.OnErrorLoadOnly:
				m.failed.Store(true)
				log.Error("tokenizer not loaded: the model is routed by load", "model", m.label, "err", err)
			default:
				errs[i] = fmt.Errorf("models[%d] (%s): load tokenizer: %w", i, m.label, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// close frees the native memory of all tokenizers once no call uses them.
func (t *tokenizers) close() error {
	var errs []error
	for _, m := range t.models {
		if loaded := m.loaded.Swap(nil); loaded != nil {
			errs = append(errs, loaded.Close())
		}
	}
	return errors.Join(errs...)
}

// remoteTokenizer asks the replicas of a model for token ids. It implements tokenize.Remote.
type remoteTokenizer struct {
	fleet  *replica.Fleet
	client *http.Client
	turn   atomic.Uint64
	names  func() map[string]bool
}

var _ tokenize.Remote = (*remoteTokenizer)(nil)

// maxTokenizeAnswer bounds what is read of a replica's answer, in bytes: a million ids of seven digits.
const maxTokenizeAnswer = 16 << 20

// newRemoteTokenizer asks replicas that serve one of names; nil stands for any.
func newRemoteTokenizer(fleet *replica.Fleet, names func() map[string]bool) *remoteTokenizer {
	transport := &http.Transport{MaxIdleConnsPerHost: 32, IdleConnTimeout: 4 * time.Second, DisableCompression: true}
	return &remoteTokenizer{
		fleet: fleet, names: names,
		client: &http.Client{
			Transport: transport,
			CheckRedirect: func(*http.Request, []*http.Request) error {
				return http.ErrUseLastResponse
			},
		},
	}
}

func (t *remoteTokenizer) close() { t.client.CloseIdleConnections() }

// Tokenize posts body to the /tokenize of a healthy replica of the model, each time of the next.
func (t *remoteTokenizer) Tokenize(ctx context.Context, body []byte) ([]uint32, error) {
	addr, ok := t.pick()
	if !ok {
		return nil, errors.New("no healthy replica to ask for token ids")
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, addr+"/tokenize", bytes.NewReader(body))
	if err != nil {
		return nil, errors.New("make a request for token ids")
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := t.client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("ask %s for token ids: %w", addr, err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxTokenizeAnswer))
	if err != nil {
		return nil, fmt.Errorf("read token ids of %s: %w", addr, err)
	}
	if resp.StatusCode != http.StatusOK {
		// The engine's message may quote the prompt.
		return nil, fmt.Errorf("ask %s for token ids: status %d", addr, resp.StatusCode)
	}
	var ids struct {
		Tokens []uint32 `json:"tokens"`
	}
	if json.Unmarshal(answer, &ids) != nil {
		return nil, fmt.Errorf("read token ids of %s: the answer is not what /tokenize gives", addr)
	}
	return ids.Tokens, nil
}

func (t *remoteTokenizer) pick() (string, bool) {
	names := t.names()
	var addrs []string
	for _, s := range t.fleet.AppendSnapshots(nil) {
		if !s.Healthy || s.Draining {
			continue
		}
		ok := names == nil || len(s.Models) == 0
		for _, m := range s.Models {
			ok = ok || names[m.ID]
		}
		if ok {
			addrs = append(addrs, s.ID.Addr)
		}
	}
	if len(addrs) == 0 {
		return "", false
	}
	return addrs[t.turn.Add(1)%uint64(len(addrs))], true
}
