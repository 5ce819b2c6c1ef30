package index

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// ParseURL reads the address of a Redis into options for redis.NewUniversalClient, tuned for an index: RESP3, deadlines of
// the context respected, no retries and no pauses between redirections, so that a lookup ends when its time is up.
//
//	redis://[user:password@]host[:6379][/db]
//	unix://[user:password@]/path/to/socket
//	redis-sentinel://[user:password@]host[:26379][,host...]/master[/db]
//	redis-cluster://[user:password@]host[:6379][,host...]
//
// rediss, rediss-sentinel and rediss-cluster are the same over TLS. IPv6 addresses stand in brackets; user and password are
// percent-encoded. Options follow a question mark:
//
//	db                     number of the database, 0 by default; not with a cluster
//	password_file          file that holds the password, instead of one in the URL
//	sentinel_username, sentinel_password_file    what the sentinels want, if anything
//	ca_file                certificates to trust instead of the system's, PEM
//	cert_file, key_file    client certificate, PEM
//	server_name            name in the server's certificate, if not the host's
//	skip_verify            true accepts any certificate
//	client_name            shown by CLIENT LIST; prefixgate by default
//	protocol               2 or 3, the default
//	pool_size, min_idle_conns                    connections for each node
//	dial_timeout, conn_max_idle_time, conn_max_lifetime    durations such as 500ms
//
// Errors name what is wrong, never what the URL holds: a misplaced character makes any part of it the password.
func ParseURL(address string) (*redis.UniversalOptions, error) {
	scheme, rest, ok := strings.Cut(address, "://")
	if !ok {
		return nil, errors.New("redis address: no scheme; want redis://host:6379 or another of redis, rediss, unix, redis-sentinel, redis-cluster")
	}
	o := &redis.UniversalOptions{
		Protocol:              3,
		ClientName:            "prefixgate",
		DisableIdentity:       true,
		ContextTimeoutEnabled: true,
		// Every exchange has its own, much shorter deadline; these bound the rest.
		DialTimeout:   time.Second,
		ReadTimeout:   time.Second,
		WriteTimeout:  time.Second,
		DialerRetries: 1,
		// Whatever failed is not tried twice within a few milliseconds. Redirections of a cluster are followed at once.
		MaxRetries:      -1,
		MinRetryBackoff: -1,
		MaxRetryBackoff: -1,
		// A handshake for managed services that would need one more right.
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
	kind, port := "single", "6379"
	switch scheme {
	case "redis", "rediss":
	case "unix":
		kind = "unix"
	case "redis-sentinel", "rediss-sentinel":
		kind, port = "sentinel", "26379"
	case "redis-cluster", "rediss-cluster":
		kind = "cluster"
		o.IsClusterMode = true
	default:
		return nil, errors.New("redis address: unknown scheme; want redis, rediss, unix, redis-sentinel, rediss-sentinel, redis-cluster or rediss-cluster")
	}
	if strings.HasPrefix(scheme, "rediss") {
		o.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12}
	}

	rest, query, _ := strings.Cut(rest, "?")
	authority, path := rest, ""
	if i := strings.IndexByte(rest, '/'); i >= 0 {
		authority, path = rest[:i], rest[i:]
	}
	if i := strings.LastIndexByte(authority, '@'); i >= 0 {
		user, password, _ := strings.Cut(authority[:i], ":")
		authority = authority[i+1:]
		var err1, err2 error
		o.Username, err1 = url.PathUnescape(user)
		o.Password, err2 = url.PathUnescape(password)
		if err1 != nil || err2 != nil {
			return nil, errors.New("redis address: user or password is not percent-encoded")
		}
	}
	if kind == "unix" {
		if authority != "" || len(path) < 2 {
			return nil, errors.New("redis address: a Unix socket wants an absolute path, as in unix:///run/redis.sock")
		}
		o.Addrs = []string{path}
		path = ""
	} else {
		for i, host := range strings.Split(authority, ",") {
			addr, err := hostPort(host, port)
			if err != nil {
				return nil, fmt.Errorf("redis address: host %d: %w", i+1, err)
			}
			o.Addrs = append(o.Addrs, addr)
		}
		if len(o.Addrs) > 1 && kind == "single" {
			return nil, errors.New("redis address: several hosts need the scheme redis-cluster or redis-sentinel")
		}
	}

	parts := strings.FieldsFunc(path, func(r rune) bool { return r == '/' })
	if kind == "sentinel" {
		if len(parts) == 0 {
			return nil, errors.New("redis address: sentinels want the master's name as the path, as in redis-sentinel://host:26379/mymaster")
		}
		name, err := url.PathUnescape(parts[0])
		if err != nil {
			return nil, errors.New("redis address: the master's name is not percent-encoded")
		}
		o.MasterName, parts = name, parts[1:]
	}
	if len(parts) > 0 {
		db, err := strconv.Atoi(parts[0])
		if err != nil || db < 0 || len(parts) > 1 {
			return nil, errors.New("redis address: the path is not the number of a database")
		}
		o.DB = db
	}
	if err := urlOptions(o, query); err != nil {
		return nil, err
	}
	if kind == "cluster" && o.DB != 0 {
		return nil, errors.New("redis address: a cluster has database 0 only")
	}
	return o, nil
}

// Open returns a client for the address, as ParseURL reads it. It does not connect: the first use does, and Redis need not be
// there before. The caller closes it.
func Open(address string) (redis.UniversalClient, error) {
	o, err := ParseURL(address)
	if err != nil {
		return nil, err
	}
	return redis.NewUniversalClient(o), nil
}

// SetClientLogger sends what go-redis has to say to log, at Debug: failed dials and failovers, which an index counts and, at
// the start and end of an outage, logs by itself. The setting is the whole process's, as go-redis knows no other; without
// it the library writes to standard error, once for each failed dial. Call it once, before the first client.
func SetClientLogger(log *slog.Logger) { redis.SetLogger(clientLogger{log}) }

type clientLogger struct{ log *slog.Logger }

// Printf implements go-redis' logging interface.
func (l clientLogger) Printf(ctx context.Context, format string, args ...any) {
	if l.log.Enabled(ctx, slog.LevelDebug) {
		l.log.DebugContext(ctx, "redis client", "detail", fmt.Sprintf(format, args...))
	}
}

func hostPort(host, port string) (string, error) {
	switch {
	case strings.HasPrefix(host, "["):
		end := strings.IndexByte(host, ']')
		if end < 0 {
			return "", errors.New("the bracket of the IPv6 address is not closed")
		}
		addr, rest := host[1:end], host[end+1:]
		if rest != "" {
			if rest[0] != ':' {
				return "", errors.New("only a port may follow the IPv6 address")
			}
			port = rest[1:]
		}
		host = addr
	case strings.Count(host, ":") > 1:
		return "", errors.New("an IPv6 address wants brackets")
	default:
		if h, p, ok := strings.Cut(host, ":"); ok {
			host, port = h, p
		}
	}
	if host == "" {
		return "", errors.New("is empty")
	}
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return "", errors.New("the port is not a number from 1 to 65535")
	}
	return net.JoinHostPort(host, port), nil
}

// urlOptions applies the part of the address after the question mark.
func urlOptions(o *redis.UniversalOptions, query string) error {
	values, err := url.ParseQuery(query)
	if err != nil {
		return errors.New("redis address: the options after the question mark are not percent-encoded")
	}
	var errs []error
	bad := func(name, want string) {
		errs = append(errs, fmt.Errorf("redis address: option %s: want %s", name, want))
	}
	number := func(name string, dst *int, from int) {
		if n, err := strconv.Atoi(values.Get(name)); err != nil || n < from {
			bad(name, fmt.Sprintf("a number of at least %d", from))
		} else {
			*dst = n
		}
	}
	duration := func(name string, dst *time.Duration) {
		if d, err := time.ParseDuration(values.Get(name)); err != nil || d <= 0 {
			bad(name, "a positive duration such as 500ms")
		} else {
			*dst = d
		}
	}
	secret := func(name string, dst *string) {
		// The path is not secret, and without it nobody finds the mistake.
		if b, err := os.ReadFile(values.Get(name)); err != nil {
			errs = append(errs, fmt.Errorf("redis address: option %s: %w", name, err))
		} else {
			*dst = strings.TrimRight(string(b), "\r\n")
		}
	}
	for name := range values {
		switch name {
		case "db":
			number(name, &o.DB, 0)
		case "protocol":
			if number(name, &o.Protocol, 2); o.Protocol > 3 {
				bad(name, "2 or 3")
			}
		case "pool_size":
			number(name, &o.PoolSize, 1)
		case "min_idle_conns":
			number(name, &o.MinIdleConns, 0)
		case "client_name":
			o.ClientName = values.Get(name)
		case "sentinel_username":
			o.SentinelUsername = values.Get(name)
		case "password_file":
			secret(name, &o.Password)
		case "sentinel_password_file":
			secret(name, &o.SentinelPassword)
		case "dial_timeout":
			duration(name, &o.DialTimeout)
		case "conn_max_idle_time":
			duration(name, &o.ConnMaxIdleTime)
		case "conn_max_lifetime":
			duration(name, &o.ConnMaxLifetime)
		case "ca_file", "cert_file", "key_file", "server_name", "skip_verify":
			if o.TLSConfig == nil {
				bad(name, "a scheme with TLS (rediss, rediss-sentinel, rediss-cluster)")
			}
		default:
			errs = append(errs, errors.New("redis address: unknown option after the question mark"))
		}
	}
	if o.TLSConfig != nil {
		errs = append(errs, tlsOptions(o.TLSConfig, values)...)
	}
	// The order of a map is random; a message should not be.
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(errs...)
}

func tlsOptions(c *tls.Config, values url.Values) []error {
	var errs []error
	c.ServerName = values.Get("server_name")
	if v := values.Get("skip_verify"); v != "" {
		skip, err := strconv.ParseBool(v)
		if err != nil {
			errs = append(errs, errors.New("redis address: option skip_verify: want true or false"))
		}
		c.InsecureSkipVerify = skip
	}
	if file := values.Get("ca_file"); file != "" {
		pem, err := os.ReadFile(file)
		if err != nil {
			errs = append(errs, fmt.Errorf("redis address: option ca_file: %w", err))
		} else if c.RootCAs = x509.NewCertPool(); !c.RootCAs.AppendCertsFromPEM(pem) {
			errs = append(errs, errors.New("redis address: option ca_file: the file holds no PEM certificate"))
		}
	}
	cert, key := values.Get("cert_file"), values.Get("key_file")
	if (cert == "") != (key == "") {
		errs = append(errs, errors.New("redis address: options cert_file and key_file go together"))
	} else if cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			errs = append(errs, fmt.Errorf("redis address: options cert_file and key_file: %w", err))
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return errs
}
