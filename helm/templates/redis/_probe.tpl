{{/* Both clients read the password from the environment, each by its own name for it. */}}
{{- define "twostep.redisPing" -}}
[/bin/sh, -c, 'cli=$(command -v valkey-cli || command -v redis-cli); test "$(VALKEYCLI_AUTH=$REDIS_PASSWORD REDISCLI_AUTH=$REDIS_PASSWORD $cli -h 127.0.0.1 ping)" = PONG']
{{- end -}}
