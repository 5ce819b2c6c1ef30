package replica

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"time"
)

// polls names what is asked of a replica. The set is closed: it is a metric's label.
var polls = [...]string{"health", "metrics", "models"}

const (
	pollHealth = iota
	pollMetrics
	pollModels
)

func newClient() *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			DialContext:         (&net.Dialer{Timeout: 5 * time.Second}).DialContext,
			MaxIdleConnsPerHost: 2,
			// Below uvicorn's 5 s, so that a poll does not pick a connection the engine is about to close.
			IdleConnTimeout: 4 * time.Second,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// wait sleeps for about d, so that polls of many replicas do not fall together. It reports false once ctx is done.
func wait(ctx context.Context, d time.Duration, kick <-chan struct{}) bool {
	t := time.NewTimer(d - d/10 + rand.N(d/5+1)) //nolint:gosec // Spreads load; no secret.
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-kick:
		return true
	case <-ctx.Done():
		return false
	}
}

// pollHealth asks for the replica's health until ctx is done.
func (in *instance) pollHealth(ctx context.Context) {
	for {
		began := time.Now()
		v, why := in.health(ctx)
		if ctx.Err() != nil {
			return
		}
		if v != verdictWell {
			in.scrapeErrors[pollHealth].Add(1)
		}
		in.judge(began, time.Now(), v, why)
		if !wait(ctx, in.fleet.opts.Interval, in.kick) {
			return
		}
	}
}

// verdict is what one poll of the health path says.
type verdict uint8

const (
	// verdictWell is a 2xx.
	verdictWell verdict = iota
	// verdictIll is any other answer, or a refused connection.
	verdictIll
	// verdictSilent is none.
	verdictSilent
)

// health asks once. Only the status counts: a 2xx whose body dawdles is healthy.
func (in *instance) health(ctx context.Context) (v verdict, why string) {
	ctx, cancel := context.WithTimeout(ctx, in.fleet.opts.Timeout)
	defer cancel()
	resp, err := in.get(ctx, in.fleet.opts.HealthPath)
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) && op.Op == "dial" && !op.Timeout() {
			return verdictIll, "health: " + reason(err)
		}
		return verdictSilent, "health: " + reason(err)
	}
	// What little an engine says there is read if it is at hand, so that the connection can be used again.
	if resp.ContentLength >= 0 && resp.ContentLength <= 4<<10 {
		_, _ = io.Copy(io.Discard, resp.Body) // bounded by its length and by ctx
	}
	_ = resp.Body.Close() // nothing of it matters
	if resp.StatusCode/100 != 2 {
		return verdictIll, fmt.Sprintf("health: status %d", resp.StatusCode)
	}
	return verdictWell, "health: ok"
}

// pollMetrics reads the replica's metrics, and now and then its models, until ctx is done.
func (in *instance) pollMetrics(ctx context.Context) {
	var modelsAt time.Time
	for {
		err := in.scrape(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			in.scrapeErrors[pollMetrics].Add(1)
			in.scrapeFailed(time.Now(), reason(err))
		}
		if now := time.Now(); now.Sub(modelsAt) >= in.fleet.opts.ModelsInterval || !in.knowsModels() {
			switch err := in.readModels(ctx); {
			case ctx.Err() != nil:
				return
			case err != nil:
				in.scrapeErrors[pollModels].Add(1)
			default:
				modelsAt = now
			}
		}
		if !wait(ctx, in.fleet.opts.Interval, nil) {
			return
		}
	}
}

// knowsModels says whether the models of the engine's present life have been read: a replica may come back with another one.
func (in *instance) knowsModels() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return len(in.models) > 0 && !in.outdated
}

// get sends a GET with the replica's key.
func (in *instance) get(ctx context.Context, path string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, in.addr+path, nil)
	if err != nil {
		return nil, err
	}
	if in.key != "" {
		req.Header.Set("Authorization", "Bearer "+in.key)
	}
	return in.fleet.client.Do(req)
}

// read gets a body of at most MaxScrapeBytes within Timeout.
func (in *instance) read(ctx context.Context, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, in.fleet.opts.Timeout)
	defer cancel()
	resp, err := in.get(ctx, path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode/100 != 2 {
		return nil, statusError(resp.StatusCode)
	}
	limit := in.fleet.opts.MaxScrapeBytes
	body, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(body)) > limit {
		return nil, errTooLarge
	}
	return body, nil
}

func (in *instance) scrape(ctx context.Context) error {
	body, err := in.read(ctx, in.fleet.opts.MetricsPath)
	if err != nil {
		return err
	}
	s, missing := in.fleet.exposition.parse(body)
	in.scraped(time.Now(), s, missing)
	return nil
}

func (in *instance) readModels(ctx context.Context) error {
	body, err := in.read(ctx, "/v1/models")
	if err != nil {
		return err
	}
	models, err := parseModels(body)
	if err != nil {
		return err
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	in.models, in.outdated = models, false
	return nil
}

// parseModels reads the answer to GET /v1/models.
func parseModels(body []byte) ([]Model, error) {
	var list struct {
		Data []json.RawMessage `json:"data"`
	}
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, fmt.Errorf("read list of models: %w", err)
	}
	models := make([]Model, 0, len(list.Data))
	for _, raw := range list.Data {
		var m struct {
			ID          string  `json:"id"`
			Parent      *string `json:"parent"`
			Root        *string `json:"root"`
			MaxModelLen *int    `json:"max_model_len"`
		}
		if err := json.Unmarshal(raw, &m); err != nil {
			return nil, fmt.Errorf("read model: %w", err)
		}
		if m.ID == "" {
			continue
		}
		model := Model{ID: m.ID, Raw: raw}
		if m.Parent != nil {
			model.Parent = *m.Parent
		}
		if m.Root != nil {
			model.Root = *m.Root
		}
		if m.MaxModelLen != nil {
			model.MaxModelLen = *m.MaxModelLen
		}
		models = append(models, model)
	}
	return models, nil
}

type statusError int

func (e statusError) Error() string { return fmt.Sprintf("status %d", int(e)) }

var errTooLarge = errors.New("answer larger than max_scrape_bytes")

// reason puts an error into words that hold no address, so that equal causes read equal.
func reason(err error) string {
	var op *net.OpError
	var status statusError
	var ne net.Error
	switch {
	case errors.As(err, &status):
		return status.Error()
	case errors.Is(err, errTooLarge):
		return err.Error()
	case errors.As(err, &ne) && ne.Timeout():
		return "timeout"
	case errors.As(err, &op) && op.Op == "dial":
		return "cannot connect: " + op.Err.Error()
	}
	return "connection failed or malformed answer"
}
