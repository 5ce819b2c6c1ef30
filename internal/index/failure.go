package index

import (
	"context"
	"errors"
	"net"
	"strings"

	"github.com/redis/go-redis/v9"
)

// failure is a kind of Redis error. The set is closed: it is a metric's label.
type failure uint8

const (
	failTimeout   failure = iota // no answer in time, or no free connection
	failNetwork                  // refused, reset, unresolvable, closed
	failAuth                     // wrong password, missing rights
	failLoading                  // starting, or in a failover
	failReadOnly                 // a write reached a replica
	failFull                     // maxmemory reached under noeviction
	failWrongType                // somebody else's value under one of our keys
	failCluster                  // slots not served, or moving faster than redirections are followed
	failReply                    // any other error reply
	failures
)

var failureNames = [failures]string{"timeout", "network", "auth", "loading", "read_only", "full", "wrong_type", "cluster", "reply"}

func kindOf(err error) failure {
	var netErr net.Error
	var reply redis.Error
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled),
		errors.Is(err, redis.ErrPoolTimeout), errors.Is(err, redis.ErrPoolExhausted):
		return failTimeout
	case errors.As(err, &reply):
		// The first word of an error reply is its code.
		code, _, _ := strings.Cut(reply.Error(), " ")
		switch code {
		case "NOAUTH", "WRONGPASS", "NOPERM":
			return failAuth
		case "LOADING", "MASTERDOWN":
			return failLoading
		case "READONLY":
			return failReadOnly
		case "OOM":
			return failFull
		case "WRONGTYPE":
			return failWrongType
		case "CLUSTERDOWN", "TRYAGAIN", "MOVED", "ASK", "CROSSSLOT":
			return failCluster
		}
		return failReply
	case errors.As(err, &netErr) && netErr.Timeout():
		return failTimeout
	}
	return failNetwork
}

// answered reports whether the error is Redis speaking rather than its absence, in which case other keys may be well.
func (f failure) answered() bool {
	switch f {
	case failReadOnly, failFull, failWrongType, failReply:
		return true
	default:
		return false
	}
}
