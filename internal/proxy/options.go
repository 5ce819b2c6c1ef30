package proxy

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"
)

// Options are the settings of a Proxy. The zero value works.
type Options struct {
	// DialTimeout is how long connecting to a replica may take before the next one is tried. Default 500ms.
	DialTimeout time.Duration `yaml:"dial_timeout"`
	// FirstByteTimeout is how long a replica may take from the request to the first byte of its answer. Then the client
	// gets a 504. 0: no limit, since a long prefill behind a queue is healthy.
	FirstByteTimeout time.Duration `yaml:"first_byte_timeout"`
	// IdleTimeout is how long an answer may pause between two bytes before it is broken off. 0: no limit.
	IdleTimeout time.Duration `yaml:"idle_timeout"`
	// TotalTimeout is how long a request may take from its arrival to the end of its answer. 0: no limit.
	TotalTimeout time.Duration `yaml:"total_timeout"`
	// WriteTimeout is how long the client may take to accept a piece of the answer before it counts as stalled and its
	// replica is freed. Default 60s; a negative value: no limit.
	WriteTimeout time.Duration `yaml:"write_timeout"`
	// IdleConnTimeout is how long an unused connection to a replica is kept. Default 4s: below the 5 s after which uvicorn,
	// in front of vLLM, closes them without notice.
	IdleConnTimeout time.Duration `yaml:"idle_conn_timeout"`
	// MaxIdleConns is the number of unused connections kept for each replica. Those in use are not limited. Default 512.
	MaxIdleConns int `yaml:"max_idle_conns"`
	// MaxAttempts is the number of replicas asked before the client gets an error. Default 3.
	MaxAttempts int `yaml:"max_attempts"`
	// RetryStatuses are statuses of a replica's answer after which the next one is asked; the last one's answer is passed on
	// as it is. Default 502 and 503; an empty list: none.
	RetryStatuses []int `yaml:"retry_statuses"`
	// RetryFirstByteTimeout asks another replica after FirstByteTimeout. Default false: the first may still be at work.
	RetryFirstByteTimeout bool `yaml:"retry_first_byte_timeout"`
	// TrustForwarded keeps the client's X-Forwarded-* headers and appends to them. Set it behind a proxy that is trusted.
	// Default false: they are replaced.
	TrustForwarded bool `yaml:"trust_forwarded"`
}

// Validate returns every problem of the options, each with its key.
func (o Options) Validate() error {
	var errs []error
	positive := func(key string, d time.Duration) {
		if d < 0 {
			errs = append(errs, fmt.Errorf("%s: got %v, want a duration of at least 0", key, d))
		}
	}
	positive("dial_timeout", o.DialTimeout)
	positive("first_byte_timeout", o.FirstByteTimeout)
	positive("idle_timeout", o.IdleTimeout)
	positive("total_timeout", o.TotalTimeout)
	positive("idle_conn_timeout", o.IdleConnTimeout)
	if o.MaxIdleConns < 0 {
		errs = append(errs, fmt.Errorf("max_idle_conns: got %d, want at least 0", o.MaxIdleConns))
	}
	if o.MaxAttempts < 0 {
		errs = append(errs, fmt.Errorf("max_attempts: got %d, want at least 0", o.MaxAttempts))
	}
	for _, status := range o.RetryStatuses {
		if status < 400 || status > 599 {
			errs = append(errs, fmt.Errorf("retry_statuses: got %d, want statuses from 400 to 599", status))
		}
	}
	return errors.Join(errs...)
}

func (o Options) withDefaults() Options {
	if o.DialTimeout == 0 {
		o.DialTimeout = 500 * time.Millisecond
	}
	if o.WriteTimeout == 0 {
		o.WriteTimeout = time.Minute
	}
	if o.IdleConnTimeout == 0 {
		o.IdleConnTimeout = 4 * time.Second
	}
	if o.MaxIdleConns == 0 {
		o.MaxIdleConns = 512
	}
	if o.MaxAttempts == 0 {
		o.MaxAttempts = 3
	}
	if o.RetryStatuses == nil {
		o.RetryStatuses = []int{http.StatusBadGateway, http.StatusServiceUnavailable}
	}
	return o
}

// newTransport returns a transport that adds nothing to a request and hides nothing of an answer.
func newTransport(o Options) *http.Transport {
	dialer := &net.Dialer{Timeout: o.DialTimeout, KeepAlive: 15 * time.Second}
	return &http.Transport{
		// No Proxy: replicas are addressed directly, whatever the environment says.
		DialContext:           dialer.DialContext,
		TLSHandshakeTimeout:   4 * o.DialTimeout,
		DisableCompression:    true, // else it would ask for gzip and undo it
		MaxIdleConnsPerHost:   o.MaxIdleConns,
		MaxConnsPerHost:       0, // a limit would queue requests where no metric sees them
		IdleConnTimeout:       o.IdleConnTimeout,
		ExpectContinueTimeout: time.Second,
		ReadBufferSize:        16 << 10,
		WriteBufferSize:       16 << 10,
	}
}
